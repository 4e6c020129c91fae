# my_method.py: python diffu_grpo_train.py --method my_method.py ...
from d1.masking import draw_masks
from d1.rl import Objective
from d1.scoring import Estimator, views_of_canvas


def half(sampled, random, settings):
    """One view: half of a completion's tokens are hidden, at random, and each of these counts twice."""
    hidden = draw_masks(sampled.scored, 0.5, random.generators).unsqueeze(1)  # (rows, views, canvas)
    prompt = draw_masks(sampled.maskable, settings.p_mask_prompt, random.generators).unsqueeze(1)
    return views_of_canvas(prompt, hidden, sampled.scored, weights=2.0 * hidden)


def push(inputs, settings):
    """Completions that did better become likelier, the others less likely, whatever their length."""
    per_row = (inputs.logps * inputs.mask).sum(-1) / inputs.lengths
    return -(inputs.advantages * per_row).mean(), {"pushed": inputs.advantages.abs().mean().item()}


ESTIMATORS = {"half": Estimator(half)}
OBJECTIVES = {"push": Objective(push, reads_old=False)}
METHOD = {"estimator": "half", "p_mask_prompt": 0.0, "objective": "push", "beta": 0.0, "num_iterations": 2}
