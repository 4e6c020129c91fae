"""The rehearsal can fail: each deliberate mistake is found at its place, and what a GPU allows passes."""

import pytest
import torch

from d1.masking import keyed_generator
from tests.rehearsal.device import DEVICE, Misplaced, Waits, rehearsal


def plus_a_number_from_the_cpu(values):
    return values + torch.tensor(1.0)


def joined_with_the_cpu(values):
    return torch.cat([values, torch.zeros(3)])


def filled_in_place_from_the_cpu(values):
    return values.mul_(torch.ones(3))


def indexes_a_cpu_tensor(values):
    return torch.zeros(3)[values.long()]


def drawn_with_the_cpus_generator(values):
    return torch.rand(3, generator=keyed_generator(0), device=values.device)


def drawn_with_the_devices_generator(values):
    return torch.rand(3, generator=keyed_generator(0, device=values.device))


MISPLACED = [
    plus_a_number_from_the_cpu,
    joined_with_the_cpu,
    filled_in_place_from_the_cpu,
    indexes_a_cpu_tensor,
    drawn_with_the_cpus_generator,
    drawn_with_the_devices_generator,
]


def item_in_a_loop(values):
    return sum(value.item() for value in values)


def truth(values):
    return 1 if (values > 0).any() else 0


def as_an_index(values):
    return range(10)[values.long()[0]]


def listed(values):
    return values.tolist()


def copied_to_the_cpu(values):
    return values.cpu()


def written_to_the_cpu(values):
    return torch.zeros(3).copy_(values)


def compared(values):
    return torch.equal(values, values)


def boolean_index(values):
    return values[values > 1]


def boolean_index_written(values):
    values[values > 1] = values[:2].clone()


def positions(values):
    return values.nonzero()


def where_of_one_argument(values):
    return torch.where(values > 1)


def selected(values):
    return values.masked_select(values > 1)


def distinct(values):
    return values.unique()


def repeated(values):
    return values.repeat_interleave(values.long())


def upload_that_waits(values):
    return values + torch.tensor([1.0, 2.0, 3.0]).to(values.device)


def upload_of_numbers(values):
    return values + torch.tensor([1.0, 2.0, 3.0], device=values.device)


def upload_like_another(values):
    return values + values.new_tensor([1.0, 2.0, 3.0])


def index_on_the_cpu(values):
    return values[torch.tensor([2, 0])]


WAITING = [
    item_in_a_loop,
    truth,
    as_an_index,
    listed,
    copied_to_the_cpu,
    written_to_the_cpu,
    compared,
    boolean_index,
    boolean_index_written,
    positions,
    where_of_one_argument,
    selected,
    distinct,
    repeated,
    upload_that_waits,
    upload_of_numbers,
    upload_like_another,
    index_on_the_cpu,
]


@pytest.mark.parametrize("mistake", MISPLACED)
def test_what_was_left_on_the_cpu_is_an_error(mistake):
    with rehearsal(None) as waits:
        values = torch.tensor([1.0, 2.0, 3.0]).to(DEVICE, non_blocking=True)
        with pytest.raises(Misplaced):
            mistake(values)
    assert not waits


@pytest.mark.parametrize("mistake", WAITING)
def test_a_wait_is_an_error_and_where_it_is_allowed_counted(mistake):
    name = f"tests/rehearsal/test_device.py {mistake.__name__}"
    with rehearsal(()):
        values = torch.tensor([1.0, 2.0, 3.0]).to(DEVICE, non_blocking=True)
        with pytest.raises(Waits, match=f"in {name}$"):
            mistake(values)
    with rehearsal({name}) as waits:
        mistake(torch.tensor([1.0, 2.0, 3.0]).to(DEVICE, non_blocking=True))
    assert waits == {name: 3 if mistake is item_in_a_loop else 1}


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
