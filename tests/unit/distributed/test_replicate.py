"""Gradients that are summed during the backward pass, in a group of one process."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn

from transduce.distributed import group as group_module
from transduce.distributed.group import Replicas
from transduce.distributed.launch import ProcessRank


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(group_module, "BUCKET_BYTES", 1)  # a bucket for each parameter
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))


def replicas(of: nn.Module) -> Replicas:
    return Replicas(of, torch.device("cpu"), precision="float32", process=ProcessRank())


def gradients(of: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in of.parameters() if p.grad is not None]


@pytest.mark.loopback
def test_a_repeated_backward_pass_gives_the_same_gradients() -> None:
    """The first attempt fails when some buckets are summed, and others have only the gradients of the first batch."""
    plain, summed = model(), model()
    first, last = torch.randn(6, 3), torch.randn(6, 3)
    for batch in (first, last):
        plain(batch).sum().backward()

    buckets = replicas(summed)
    summed(first).sum().backward()
    hidden = summed[0](last)
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), buckets.computing(last=True):
        summed[1:](hidden).sum().backward()
    assert 0 < len(buckets._works) < len(gradients(plain))
    summed.zero_grad(set_to_none=True)
    summed(first).sum().backward()
    with buckets.computing(last=True):
        summed(last).sum().backward()
    *sums, norm = buckets.finish([torch.tensor(2.0), torch.tensor(3.0)], [*summed.parameters()])
    assert [one.item() for one in sums] == [2.0, 3.0]
    assert norm.item() == pytest.approx(torch.cat([one.flatten() for one in gradients(plain)]).norm().item())
    for one, other in zip(gradients(summed), gradients(plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.loopback
def test_a_rank_without_a_batch_adds_zeros() -> None:
    idle = model()
    replicas(idle).finish([torch.tensor(0.0)], [*idle.parameters()])
    assert len(gradients(idle)) == 6
    assert not any(gradient.any() for gradient in gradients(idle))
