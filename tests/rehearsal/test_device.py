"""The rehearsal can fail: each deliberate mistake is found at its place, and what a GPU allows passes."""

import pytest
import torch

from d1.masking import keyed_generator
from tests.rehearsal.device import DEVICE, Misplaced, Waits, rehearsal


def indexed(values):
    values[values > 1] = values[:2].clone()


NUMBERS = [1.0, 2.0, 3.0]
MISPLACED = {
    "plus a number from the CPU": lambda values: values + torch.tensor(1.0),
    "joined with the CPU": lambda values: torch.cat([values, torch.zeros(3)]),
    "filled in place from the CPU": lambda values: values.mul_(torch.ones(3)),
    "indexes a CPU tensor": lambda values: torch.zeros(3)[values.long()],
    "drawn with the CPU's generator": lambda values: torch.rand(3, generator=keyed_generator(0), device=values.device),
    "drawn with the device's generator": lambda values: torch.rand(
        3, generator=keyed_generator(0, device=values.device)
    ),
}
WAITING = {
    "items in a loop": lambda values: values[0].item() + values[1].item() + values[2].item(),
    "truth": lambda values: 1 if (values > 0).any() else 0,
    "as an index": lambda values: range(10)[values.long()[0]],
    "listed": lambda values: values.tolist(),
    "copied to the CPU": lambda values: values.cpu(),
    "written to the CPU": lambda values: torch.zeros(3).copy_(values),
    "compared": lambda values: torch.equal(values, values),
    "boolean index": lambda values: values[values > 1],
    "boolean index written": indexed,
    "positions": lambda values: values.nonzero(),
    "where of one argument": lambda values: torch.where(values > 1),
    "selected": lambda values: values.masked_select(values > 1),
    "distinct": lambda values: values.unique(),
    "repeated": lambda values: values.repeat_interleave(values.long()),
    "upload that waits": lambda values: values + torch.tensor(NUMBERS).to(values.device),
    "upload of numbers": lambda values: values + torch.tensor(NUMBERS, device=values.device),
    "upload like another": lambda values: values + values.new_tensor(NUMBERS),
    "index on the CPU": lambda values: values[torch.tensor([2, 0])],
}


@pytest.mark.parametrize("mistake", MISPLACED.values(), ids=MISPLACED)
def test_what_was_left_on_the_cpu_is_an_error(mistake):
    with rehearsal(None) as waits:
        values = torch.tensor(NUMBERS).to(DEVICE, non_blocking=True)
        with pytest.raises(Misplaced):
            mistake(values)
    assert not waits


@pytest.mark.parametrize("mistake", WAITING.values(), ids=WAITING)
def test_a_wait_is_an_error_and_where_it_is_allowed_counted(mistake):
    name = f"tests/rehearsal/test_device.py {mistake.__name__}"
    with rehearsal(()):
        values = torch.tensor(NUMBERS).to(DEVICE, non_blocking=True)
        with pytest.raises(Waits, match=f"in {name}$"):
            mistake(values)
    with rehearsal({name}) as waits:
        mistake(torch.tensor(NUMBERS).to(DEVICE, non_blocking=True))
    assert waits == {name: 3 if mistake is WAITING["items in a loop"] else 1}


def test_a_wait_of_a_backward_pass_is_an_error():
    with rehearsal(()):
        values = torch.ones(3, device=DEVICE, requires_grad=True)
        doubled = values * 2
        doubled.register_hook(lambda gradient: gradient * gradient.sum().item())
        with pytest.raises(Waits, match="test_a_wait_of_a_backward_pass_is_an_error"):
            doubled.sum().backward()


def run(device):
    """What a GPU does without a wait: views, writes in place, indices, draws, gradients, an optimizer."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).to(device, non_blocking=True))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    rows = torch.tensor([2, 0]).to(device, non_blocking=True)
    noise = torch.rand(2, 4, generator=keyed_generator(3, device=device), device=device)
    for _ in range(2):
        values = torch.where(noise > 0.5, weight[rows], 0.0).clone()
        values[:, 1] = 2.0
        values[values > 1] = 0.5
        values.t()[0].add_(1)
        loss = (values.softmax(-1).cumsum(1) ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach()


def test_the_numbers_are_those_of_a_run():
    with rehearsal(()):
        rehearsed = run(DEVICE)
    assert rehearsed.device == DEVICE
    assert torch.equal(rehearsed.numbers, run(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="a rehearsal that is over"):
        rehearsed + 1
