"""Log-probabilities of completions under a masked diffusion model."""

from d1.scoring.views import mean_field_logps as mean_field_logps
