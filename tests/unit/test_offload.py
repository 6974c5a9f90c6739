"""Moving storages between device and host: the same code as on a GPU, with a torch model instead of Megatron's."""

import copy
from types import SimpleNamespace

import pytest
import torch

from helpers.offload import (
    ALIGNMENT,
    PARTS,
    HostBlock,
    OffloadError,
    TrainerMemory,
    Where,
    staged_tasks,
    storages,
)


class Chunk(torch.nn.Module):
    """A layer with a frozen weight, a weight that is a view into a larger block, and a buffer of gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        block = torch.randn(40)
        self.view = torch.nn.Parameter(block[8:20].view(3, 4))
        self.own = torch.nn.Parameter(torch.randn(5, 3))
        self.frozen = torch.nn.Parameter(torch.randn(7, 2), requires_grad=False)
        self.grads = torch.zeros(27)

    @property
    def buffers(self):  # as Megatron's DistributedDataParallel: a list, not nn.Module's method
        return [SimpleNamespace(grad_data=self.grads)]


@pytest.fixture
def trainer():
    chunk = Chunk()
    masters = [torch.nn.Parameter(p.detach().clone()) for p in (chunk.view, chunk.own)]
    adam = torch.optim.Adam(masters, lr=0.1)
    for master in masters:
        master.grad = torch.ones_like(master)
    adam.step()
    memory = TrainerMemory([chunk], SimpleNamespace(optimizer=adam), "cpu")
    return SimpleNamespace(chunk=chunk, adam=adam, masters=masters, memory=memory)


def values(trainer):
    state = [v for s in trainer.adam.state.values() for k, v in s.items() if k.startswith("exp")]
    return [t.detach().clone() for t in (*trainer.chunk.parameters(), *trainer.masters, *state)]


def test_everything_leaves_and_comes_back_as_it_was(trainer):
    before, pointers = values(trainer), [id(p) for p in trainer.chunk.parameters()]
    trainer.chunk.grads.fill_(3.0)
    moves = {move.part: move for move in trainer.memory.offload()}
    assert [p.untyped_storage().nbytes() for p in trainer.chunk.parameters()] == [0, 0, 0]
    assert trainer.chunk.grads.untyped_storage().nbytes() == 0
    assert all(m.untyped_storage().nbytes() == 0 for m in trainer.masters)
    # the view's block counts whole; Adam: two moments and a master copy of 12 and 15 numbers
    assert {name: m.bytes for name, m in moves.items()} == {
        "weights": 4 * (40 + 15 + 14), "gradients": 4 * 27, "optimizer": 4 * 3 * 27,
    }  # fmt: skip
    assert [moves[p].where for p in PARTS] == [Where.HOST, Where.DROPPED, Where.HOST]
    trainer.memory.load_back()
    assert all(torch.equal(a, b) for a, b in zip(before, values(trainer), strict=True))
    assert not trainer.chunk.grads.any() and pointers == [id(p) for p in trainer.chunk.parameters()]


def test_an_optimizer_goes_on_after_the_journey(trainer):
    twin = torch.optim.Adam([torch.nn.Parameter(m.detach().clone()) for m in trainer.masters], lr=0.1)
    twin.load_state_dict(copy.deepcopy(trainer.adam.state_dict()))
    trainer.memory.offload()
    trainer.memory.load_back()
    for adam in (trainer.adam, twin):
        for group in adam.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.5)
        adam.step()
    pairs = zip(trainer.masters, twin.param_groups[0]["params"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_weights_can_be_read_while_they_are_away(trainer):
    before = trainer.chunk.view.detach().clone()
    trainer.memory.offload(["weights"])
    assert torch.equal(trainer.memory.host_copy(trainer.chunk.view), before)
    trainer.memory.load_back()
    with pytest.raises(OffloadError, match="not among the offloaded"):
        trainer.memory.host_copy(trainer.chunk.view)


def test_a_stranger_is_not_among_the_weights(trainer):
    trainer.memory.offload(["weights"])
    with pytest.raises(OffloadError, match="not among the offloaded"):
        trainer.memory.host_copy(torch.ones(3))


def test_what_is_away_stays_away_and_what_is_here_stays_here(trainer):
    assert len(trainer.memory.offload(["optimizer"])) == 1
    assert [move.part for move in trainer.memory.offload()] == ["weights", "gradients"]
    assert trainer.memory.offload() == []
    assert [move.part for move in trainer.memory.load_back()] == list(PARTS)
    assert trainer.memory.load_back() == []


def test_the_host_block_is_kept_and_takes_the_new_values(trainer):
    trainer.memory.offload(["weights"])
    block = trainer.memory._blocks["weights"]
    trainer.memory.load_back()
    with torch.no_grad():
        trainer.chunk.own.fill_(9.0)
    trainer.memory.offload(["weights"])
    assert trainer.memory._blocks["weights"] is block
    trainer.memory.load_back()
    assert bool((trainer.chunk.own == 9.0).all())


def test_an_optimizer_that_grew_gets_a_new_block():
    chunk = Chunk()
    adam = torch.optim.Adam([chunk.own], lr=0.1)
    memory = TrainerMemory([chunk], SimpleNamespace(optimizer=adam), "cpu")
    assert [m.bytes for m in memory.offload(["optimizer"])] == [0]  # fp32: no masters, and no step yet
    memory.load_back()
    chunk.own.grad = torch.ones_like(chunk.own)
    adam.step()
    assert [m.bytes for m in memory.offload(["optimizer"])] == [4 * 2 * 15]
    memory.load_back()
    assert adam.state[chunk.own]["exp_avg"].any()


def test_require_names_what_is_missing(trainer):
    trainer.memory.require(*PARTS, call="update")
    trainer.memory.offload(["weights", "gradients"])
    with pytest.raises(OffloadError) as error:
        trainer.memory.require(*PARTS, call="update")
    assert str(error.value) == (
        "update needs weights (in host memory), gradients (given up) on the device: call trainer.memory.load_back() first"
    )


@pytest.mark.parametrize("parts", [["weigths"], "weights", ["weights", "kv"]])
def test_unknown_parts_move_nothing(trainer, parts):
    with pytest.raises(ValueError, match="unknown parts"):
        trainer.memory.offload(parts)
    assert set(trainer.memory.where.values()) == {Where.DEVICE}


def test_a_storage_that_numpy_holds_is_refused_and_nothing_moves(trainer):
    trainer.chunk.own.detach().numpy()
    before = values(trainer)
    with pytest.raises(OffloadError, match="1 storages of weights .60 bytes. cannot be emptied"):
        trainer.memory.offload()
    assert trainer.memory.where["weights"] is Where.DEVICE
    assert all(torch.equal(a, b) for a, b in zip(before, values(trainer), strict=True))


def test_a_full_device_loses_nothing(trainer):
    before = values(trainer)
    trainer.memory.offload()
    right = trainer.memory._sizes["weights"]
    trainer.memory._sizes["weights"] = [right[0], 1 << 50, right[2]]  # no machine has that much
    with pytest.raises(OffloadError, match="no room for weights .*Nothing is lost"):
        trainer.memory.load_back()
    assert trainer.memory.where["weights"] is Where.HOST
    assert all(p.untyped_storage().nbytes() == 0 for p in trainer.chunk.parameters())
    trainer.memory._sizes["weights"] = right
    trainer.memory.load_back()
    assert all(torch.equal(a, b) for a, b in zip(before, values(trainer), strict=True))


def test_restoring_gives_the_host_memory_up(trainer):
    before = values(trainer)
    trainer.memory.offload()
    trainer.memory.restore()
    assert not trainer.memory._blocks
    assert all(torch.equal(a, b) for a, b in zip(before, values(trainer), strict=True))


def test_a_closed_trainer_holds_nothing_and_says_so(trainer):
    trainer.memory.offload(["optimizer"])
    trainer.memory.discard()
    assert all(p.untyped_storage().nbytes() == 0 for p in (*trainer.chunk.parameters(), *trainer.masters))
    for call in (trainer.memory.load_back, lambda: trainer.memory.require("weights", call="update")):
        with pytest.raises(OffloadError, match="closed|given up"):
            call()


def test_places_in_a_block_are_aligned_and_apart():
    block = HostBlock([3, 512, 1], pin=False)
    block.place(0).fill_(1), block.place(1).fill_(2), block.place(2).fill_(3)
    assert [block.place(i).unique().tolist() for i in range(3)] == [[1], [2], [3]]
    assert block.starts == [0, ALIGNMENT, 2 * ALIGNMENT] and len(block) == 3


def test_shared_storage_counts_once():
    base = torch.zeros(10)
    assert len(storages([base, base[2:], base.view(2, 5), torch.zeros(1)])) == 2
    assert storages([torch.empty(0)]) == []


def dataclass_task(weight):
    from dataclasses import make_dataclass

    return make_dataclass("Task", ["param_weight"])(weight)


@pytest.mark.parametrize("ahead", [0, 50, 10**6])
def test_staged_tasks_come_in_order_with_the_values_of_the_host(trainer, ahead):
    parameters = list(trainer.chunk.parameters())
    parameters[1].tensor_model_parallel, parameters[1].partition_dim = True, 1
    expected = [p.detach().clone() for p in parameters]
    tasks = [dataclass_task(p) for p in parameters]
    tasks.insert(1, dataclass_task(None))  # another pipeline stage's
    tasks.insert(2, None)
    trainer.memory.offload(["weights"])
    out = list(staged_tasks(tasks, trainer.memory, ahead))
    assert out[1].param_weight is None and out[2] is None
    staged = [task.param_weight for task in (out[0], *out[3:])]
    assert all(torch.equal(a, b) for a, b in zip(staged, expected, strict=True))
    assert staged[1].tensor_model_parallel and staged[1].partition_dim == 1
    assert parameters[1].untyped_storage().nbytes() == 0, "reading brings nothing back"


def test_no_more_than_asked_is_staged_ahead(trainer):
    trainer.memory.offload(["weights"])
    parameters = list(trainer.chunk.parameters())
    taken = []

    def tasks():
        for p in parameters * 20:
            taken.append(p)
            yield dataclass_task(p)

    limit = 200  # bytes; the largest weight has 60
    for i, _ in enumerate(staged_tasks(tasks(), trainer.memory, limit), start=1):
        ahead = sum(p.numel() * 4 for p in taken[i:])
        assert ahead <= limit + 60
