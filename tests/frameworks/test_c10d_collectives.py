"""The collectives of the farandole backend, against gloo's and against plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from c10d_work import gloo, ours_alone, prepare
from rank_cases import make_tests, on_ranks, refused
from torch_work import numbers, same

import farandole as fd

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1000,), (70_001,)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
WIDE = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [*FLOATS, *INTEGERS, *WIDE, *COMPLEX, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
Op = dist.ReduceOp


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Not contiguous, where the shape allows."""
    return torch.zeros((*shape, 2), dtype=dtype)[..., 0]


@on_ranks(1, 2, 3, 4)
def all_reduce_is_right_for_every_dtype_op_and_layout() -> None:
    for dtype in [*FLOATS, *INTEGERS]:
        for shape in SHAPES:
            whole = torch.stack([numbers(shape, dtype, r) for r in range(size())]).double()
            expected = {
                Op.SUM: whole.sum(0), Op.MIN: whole.amin(0), Op.MAX: whole.amax(0),
                Op.PRODUCT: whole.prod(0), Op.AVG: whole.mean(0),
            }  # fmt: skip
            for op, right in expected.items():
                for x in (numbers(shape, dtype, rank()), strided(shape, dtype)):
                    x.copy_(numbers(shape, dtype, rank()))
                    dist.all_reduce(x, op)
                    if op == Op.AVG and dtype.is_floating_point:
                        torch.testing.assert_close(x, right.to(dtype))
                    else:
                        same(x, right.to(dtype))
    ours_alone()


@on_ranks(2, 3)
def booleans_complex_numbers_and_premultiplied_sums_reduce() -> None:
    mine = torch.tensor([rank() == 0, True, False])
    for op, right in {
        Op.SUM: [True, True, False], Op.PRODUCT: [False, True, False],
        Op.BOR: [True, True, False], Op.BAND: [False, True, False],
    }.items():  # fmt: skip
        x = mine.clone()
        dist.all_reduce(x, op)
        assert x.tolist() == right, op
    z = numbers((5,), torch.complex64, rank())
    dist.all_reduce(z)
    same(z, torch.stack([numbers((5,), torch.complex64, r) for r in range(size())]).sum(0))
    y = torch.ones(3)
    dist.all_reduce(y, dist._make_nccl_premul_sum(0.5))
    assert y.tolist() == [size() / 2] * 3
    ours_alone()


@on_ranks(2, 3)
def movements_are_gloo_s_for_every_dtype_and_layout() -> None:
    last = size() - 1
    for dtype in MOVED:
        for shape in SHAPES:
            for make in (
                lambda s=shape, d=dtype: torch.zeros(s, dtype=d),
                lambda s=shape, d=dtype: strided(s, d),
            ):
                everyones = [numbers(shape, dtype, r) for r in range(size())]
                x = make()
                x.copy_(everyones[rank()])
                y = x.clone()
                dist.broadcast(y, last)
                same(y, everyones[last])
                gathered = [make() for _ in range(size())]
                dist.all_gather(gathered, x)
                for got, right in zip(gathered, everyones, strict=True):
                    same(got, right)
                out = make()
                dist.scatter(out, everyones if rank() == 0 else None, src=0)
                same(out, everyones[rank()])
                got_here = [make() for _ in range(size())] if rank() == last else None
                dist.gather(x, got_here, dst=last)
                if got_here is not None:
                    for got, right in zip(got_here, everyones, strict=True):
                        same(got, right)
    ours_alone()


@on_ranks(2, 3)
def lazy_views_are_read_and_written_as_they_read() -> None:
    """z.conj() and z.conj().imag, whose memory holds numbers of the other sign. PyTorch itself
    refuses the former in other operations."""
    everyones = [torch.complex(torch.arange(3.0), torch.arange(3.0) + r) for r in range(size())]
    for lazy in (torch.conj, lambda z: z.conj().imag):
        right = [lazy(z).clone() for z in everyones]

        def new(lazy: Any = lazy) -> torch.Tensor:
            return lazy(torch.zeros(3, dtype=torch.complex64))  # type: ignore[no-any-return]

        mine = lazy(everyones[rank()])
        gathered = [new() for _ in right] if rank() == 0 else None
        dist.gather(mine, gathered, dst=0)
        for got, expected in zip(gathered or (), right, strict=False):
            same(got.clone(), expected)
        got = new()
        dist.reduce_scatter(got, [mine] * size())
        same(got.clone(), torch.stack(right).sum(0))
        got = lazy(everyones[rank()].clone())
        dist.reduce(got, 0)
        if rank() == 0:
            same(got.clone(), torch.stack(right).sum(0))
    reduced = everyones[rank()].clone().conj().imag
    dist.all_reduce(reduced)
    same(reduced.clone(), -torch.stack([z.imag for z in everyones]).sum(0))


@on_ranks(2)
def results_in_an_expanded_tensor_are_refused_before_anything_is_sent() -> None:
    x = torch.ones(1).expand(3)
    refused(lambda: dist.all_reduce(x), "is expanded")
    refused(lambda: dist.broadcast(x, 0), "is expanded")
    out = [torch.zeros(3), torch.zeros(1).expand(3)]
    refused(lambda: dist.all_gather(out, torch.ones(3)), "is expanded")
    dist.all_gather(out[:1] * size(), x)  # to read one is fine
    same(out[0], torch.ones(3))


@on_ranks(2, 3)
def whole_tensors_gather_and_scatter() -> None:
    for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.complex64]:
        for rows in (0, 1, 5, 4000):
            mine = numbers((rows, 3), dtype, rank())
            everyones = torch.cat([numbers((rows, 3), dtype, r) for r in range(size())])
            out = torch.empty(size() * rows, 3, dtype=dtype)
            dist.all_gather_into_tensor(out, mine)
            same(out, everyones)
            whole = torch.stack([numbers((size() * rows, 3), dtype, r, 1) for r in range(size())])
            part = torch.empty(rows, 3, dtype=dtype)
            dist.reduce_scatter_tensor(part, whole[rank()].clone())
            right = whole.sum(0).to(dtype).split(rows or 1)[rank()] if rows else part
            same(part, right)
            dist.reduce_scatter(part, [t.clone() for t in whole[rank()].view(size(), rows, 3)])
            same(part, right)
    ours_alone()


@on_ranks(2, 3)
def lists_of_different_lengths_gather_and_scatter() -> None:
    everyones = [numbers((r + 1, 2), torch.float32, r) for r in range(size())]
    gathered = [torch.empty(r + 1, 2) for r in range(size())]
    dist.all_gather(gathered, everyones[rank()])
    for got, right in zip(gathered, everyones, strict=True):
        same(got, right)
    out = torch.empty(rank() + 1, 2)
    dist.reduce_scatter(out, [torch.full((r + 1, 2), float(r)) for r in range(size())])
    same(out, torch.full((rank() + 1, 2), float(size() * rank())))
    ours_alone()


@on_ranks(2, 4)
def reduce_reaches_its_root_alone() -> None:
    for root in range(size()):
        for shape in SHAPES:
            x, y = numbers(shape, torch.float32, rank()), numbers(shape, torch.float32, rank())
            dist.reduce(x, root)
            dist.reduce(y, root, group=gloo())
            same(x, y if rank() == root else numbers(shape, torch.float32, rank()))
    ours_alone()


@on_ranks(2, 3)
def all_to_all_is_right_even_uneven_and_in_lists() -> None:
    x = torch.arange(2.0 * size()) + 100 * rank()
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    same(y, torch.cat([torch.arange(2.0) + 2 * rank() + 100 * r for r in range(size())]))
    sends = [(rank() + 2 * to) % 3 for to in range(size())]
    takes = [(r + 2 * rank()) % 3 for r in range(size())]
    x = numbers((sum(sends), 2), torch.int32, rank())
    ours, theirs = (
        torch.empty(sum(takes), 2, dtype=torch.int32),
        torch.empty(sum(takes), 2, dtype=torch.int32),
    )
    dist.all_to_all_single(ours, x, takes, sends)
    dist.all_to_all_single(theirs, x, takes, sends, group=gloo())
    same(ours, theirs)
    outs = [torch.empty(n, 2) for n in takes]
    dist.all_to_all(
        outs, [torch.full((n, 2), float(10 * rank() + to)) for to, n in enumerate(sends)]
    )
    for r, out in enumerate(outs):
        same(out, torch.full((takes[r], 2), float(10 * r + rank())))
    with pytest.raises(fd.Mismatch, match="splits"):
        dist.all_to_all_single(
            torch.empty(size() + 1), torch.empty(size()), [1] * (size() - 1) + [2], [1] * size()
        )
    ours_alone()


@on_ranks(2, 3)
def many_tensors_go_as_one() -> None:
    shapes = [(3,), (2, 2), (0,), (5000,)]
    tensors = [numbers(s, torch.float32, rank()) for s in shapes]
    rights = [sum(numbers(s, torch.float32, r) for r in range(size())) for s in shapes]
    ours = [t.clone() for t in tensors]
    dist.all_reduce_coalesced(ours)
    for got, right in zip(ours, rights, strict=True):
        same(got, right)
    ours = [t.clone() for t in tensors]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for t in ours:
            dist.all_reduce(t)
    manager.wait()
    for got, right in zip(ours, rights, strict=True):
        same(got, right)
    outs = [torch.empty(size() * t.numel()) for t in tensors]
    with dist.distributed_c10d._coalescing_manager():
        for out, t in zip(outs, tensors, strict=True):
            dist.all_gather_into_tensor(out, t)
    for shape, out in zip(shapes, outs, strict=True):
        same(out, torch.cat([numbers(shape, torch.float32, r).flatten() for r in range(size())]))
    outs = [torch.empty(4), torch.empty(0)]
    with dist.distributed_c10d._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, torch.ones(size() * out.numel()))
    assert outs[0].tolist() == [float(size())] * 4
    with dist.distributed_c10d._coalescing_manager(
        device=torch.device("cpu"), async_ops=True
    ) as manager:
        first, second = torch.ones(2), torch.ones(3)
        dist.broadcast(first, 0)
        works = dist.group.WORLD.allreduce([second])
    manager.wait()
    assert works.is_completed()
    assert second.tolist() == [float(size())] * 3
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size())]
    dist.all_gather_coalesced(
        lists, [torch.full((2,), float(rank())), torch.full((3,), float(rank()))]
    )
    assert [[t[0].item() for t in row] for row in lists] == [[r, r] for r in range(size())]
    ours_alone()


@on_ranks(2)
def the_names_of_older_releases_are_there() -> None:
    group: Any = dist.group.WORLD
    x, whole, part = torch.ones(2) * (rank() + 1), torch.empty(2 * size()), torch.empty(2)
    group._allgather_base(whole, x).wait()
    assert whole.tolist() == [1, 1, 2, 2]
    group._reduce_scatter_base(part, whole).wait()
    assert part.tolist() == [2.0 * (rank() + 1)] * 2
    group.alltoall_base(part, x, [], []).wait()
    assert part.tolist() == [1, 2]
    group.allgather_into_tensor_coalesced([whole], [x]).wait()
    group.reduce_scatter_tensor_coalesced([part], [whole]).wait()
    assert part.tolist() == [2.0 * (rank() + 1)] * 2
    ours_alone()


@on_ranks(2, 3)
def messages_meet_by_rank_and_tag() -> None:
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    if rank() == 0:
        dist.send(torch.arange(3.0), right)
        dist.send(torch.arange(4), right, tag=7)
    if rank() == 1:
        later = dist.irecv(torch.empty(4, dtype=torch.int64), 0, tag=7)
        x = torch.empty(6)[::2]
        assert dist.recv(x, 0) == 0
        same(x.contiguous(), torch.arange(3.0))
        later.wait()
        assert later._source_rank() == 0
    inbox = torch.empty(5)
    outbox = torch.full((5,), float(rank()))
    pair = [dist.P2POp(dist.irecv, inbox, left), dist.P2POp(dist.isend, outbox, right)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert inbox.tolist() == [float(left)] * 5
    ours_alone()


@on_ranks(2, 3)
def whoever_sends_first_is_received_from_and_named() -> None:
    last = size() - 1
    if rank() == last:
        seen = []
        for _ in range(4 * last):
            x = torch.empty(6)[::2]
            source = dist.recv(x)
            assert x.tolist() == [source, seen.count(source), 0]
            seen.append(source)
        assert sorted(seen) == sorted(list(range(last)) * 4)
    else:
        for i in range(4):
            dist.send(torch.tensor([float(rank()), i, 0]), last)
    # Before anybody has sent, with another tag, and named ranks in between.
    if rank() == 0:
        work = dist.irecv(x := torch.empty(2), tag=5)
        dist.barrier()
        assert not work.is_completed()
        dist.recv(y := torch.empty(1), src=1)
        assert work.wait()
        assert (y.item(), x.tolist(), work.source_rank()) == (7, [1, 2], 1)
    else:
        dist.barrier()
        if rank() == 1:
            dist.send(torch.tensor([7.0]), 0)
            dist.send(torch.tensor([1.0, 2.0]), 0, tag=5)
    pair = dist.new_group([last, 0])  # gives ranks of the world, too
    if rank() == 0:
        assert dist.recv(torch.empty(2), group=pair) == last
    elif rank() == last:
        dist.send(torch.ones(2), 0, group=pair)
    if rank() < 2:
        ends: list[Any] = [lambda: dist.send(torch.ones(2), 1), lambda: dist.recv(torch.ones(3))]
        with pytest.raises(fd.Mismatch, match="count of send: 2 on rank 0; 3 on rank 1"):
            ends[rank()]()
    alone = [dist.new_group([r]) for r in range(size())][rank()]
    refused(lambda: dist.recv(torch.ones(1), group=alone), "a group of one")
    dist.barrier()
    ours_alone()


@on_ranks(3)
def nobody_who_sends_is_waited_for_until_the_timeout_alone() -> None:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.2))
    if rank() == 0:
        with pytest.raises(fd.Stalled, match="recv from any rank, tag 3 on rank 0") as error:
            dist.recv(torch.empty(2), group=group, tag=3)
        assert error.value.rank == 0
    dist.barrier()
    with pytest.raises(fd.Stalled, match="recv from any rank, tag 3 on rank 0"):
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


@on_ranks(2, 3)
def blocks_of_different_length_are_refused_whole() -> None:
    """Large tensors: each is an operation by itself."""

    def next_is_right() -> None:
        x = torch.full((70_000,), float(rank()))
        dist.all_reduce(x)
        assert (x == sum(range(size()))).all()

    block, cpu = dist.distributed_c10d._coalescing_manager, torch.device("cpu")

    def reduced(xs: list[torch.Tensor], device: Any) -> None:
        with block(device=device):
            for x in xs:
                dist.all_reduce(x)

    def told(xs: list[torch.Tensor], root: int) -> None:
        with block(device=cpu):
            dist.broadcast(xs[0], 0)
            dist.broadcast(xs[1], root)

    more = int(rank() == 1)
    for many, elements in ((2, 70_000), (2, 5)):
        xs = [torch.ones(elements) for _ in range(many + more)]
        with pytest.raises(fd.Mismatch, match="number of arrays"):
            dist.all_reduce_coalesced(xs)
        next_is_right()
        lists = [[torch.empty(elements) for _ in xs] for _ in range(size())]
        with pytest.raises(fd.Mismatch, match="number of arrays of all_gather"):
            dist.all_gather_coalesced(lists, xs)
        next_is_right()
        for device in (None, cpu):
            with pytest.raises(fd.Mismatch, match="number of arrays"):
                reduced(xs, device)
            next_is_right()
        with pytest.raises(fd.Mismatch, match="array 1 of broadcast"):
            told(xs, more)
        next_is_right()
        assert all((x == 1).all() for x in xs[:1])
    ours_alone()


@on_ranks(2)
def a_block_begins_at_its_end() -> None:
    x, y = torch.full((3,), float(rank())), torch.full((4,), float(rank()))
    block = dist.distributed_c10d._coalescing_manager
    with block(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(x, 1)
        work = dist.broadcast(y, 1, async_op=True)
        refused(work.wait, "within the block")
        if rank() == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.empty(1), 0)
    manager.wait()
    assert work.is_completed()
    assert x.tolist() + y.tolist() == [1.0] * 7
    ours_alone()


@on_ranks(2)
def profilers_show_gloo_s_names() -> None:
    from torch.profiler import ProfilerActivity, profile

    x, parts = torch.ones(4), [torch.empty(4), torch.empty(4)]
    calls: dict[str, Callable[[], Any]] = {
        "c10d::allreduce_ gloo:all_reduce": lambda: dist.all_reduce(x),
        "c10d::broadcast_ gloo:broadcast": lambda: dist.broadcast(x, 0),
        "c10d::reduce_ gloo:reduce": lambda: dist.reduce(x, 0),
        "c10d::barrier gloo:barrier": lambda: dist.barrier(),
        "c10d::allgather_ gloo:all_gather": lambda: dist.all_gather(parts, x),
        "c10d::gather_ gloo:gather": lambda: dist.gather(x, None if rank() else parts),
        "c10d::scatter_ gloo:scatter": lambda: dist.scatter(x, None if rank() else parts),
        "c10d::alltoall_base_ gloo:all_to_all": lambda: dist.all_to_all_single(torch.empty(4), x),
        "c10d::allreduce_coalesced_ gloo:all_reduce": lambda: dist.all_reduce_coalesced([x, x]),
        "c10d::send c10d::recv_ gloo:send gloo:recv": lambda: (
            dist.recv(x, 1) if rank() == 0 else dist.send(x, 0)
        ),
    }
    for names, call in calls.items():
        other = "send" if rank() == 0 else "recv"
        shown = {name for name in names.split() if other not in name}
        for profiled in (profile, torch.autograd.profiler.profile):
            how = {"activities": [ProfilerActivity.CPU]} if profiled is profile else {}
            with profiled(record_shapes=True, **how) as result:
                call()
            seen = {e.key: e for e in result.key_averages(group_by_input_shape=True)}
            ours = {key for key in seen if key.startswith(("c10d::", "gloo:"))}
            assert ours == shown, (names, ours)
            kind = next(key for key in shown if key.startswith("gloo:"))
            if kind in ("gloo:all_reduce", "gloo:broadcast", "gloo:send"):
                assert seen[kind].input_shapes[0] == [4]
    with profile() as result:
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert any(e.key == "gloo:all_reduce" for e in result.key_averages())
    ours_alone()


@on_ranks(2, 3)
def objects_travel() -> None:
    everyones: list[Any] = [None] * size()
    dist.all_gather_object(everyones, {"rank": rank(), "text": "x" * rank()})
    assert everyones == [{"rank": r, "text": "x" * r} for r in range(size())]
    box = [{"from": 1}] if rank() == 1 else [None]
    dist.broadcast_object_list(box, src=1)
    assert box == [{"from": 1}]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(size())) if rank() == 0 else None, src=0)
    assert mine == [rank()]
    gathered: list[Any] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(rank(), gathered, dst=0)
    assert gathered is None or gathered == list(range(size()))
    if rank() == 0:
        dist.send_object_list(["a", 2], dst=1)
    if rank() == 1:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == ["a", 2]
    ours_alone()


@on_ranks(2, 3)
def works_and_their_futures_complete() -> None:
    x = torch.ones(4) * (rank() + 1)
    total = sum(range(1, size() + 1))
    work = dist.all_reduce(x, async_op=True)
    chained = work.get_future().then(lambda future: future.value()[0].sum().item())
    assert chained.wait() == 4 * total
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is not None
    assert x.tolist() == [total] * 4
    ready = dist.all_reduce(torch.ones(1), async_op=True)
    ready.wait()
    assert ready.get_future().done()
    # Futures complete in the order in which their operations do, not in that of submission.
    if rank() == 0:
        late = dist.irecv(torch.empty(1), 1).get_future()
        assert dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        assert not late.done()
        dist.barrier()
        late.wait()
    else:
        assert dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        dist.barrier()
        if rank() == 1:
            dist.send(torch.ones(1), 0)
    y = strided((1000,), torch.float32)
    dist.all_reduce(y.add_(1), async_op=True).get_future().wait()
    assert y.tolist() == [size()] * 1000
    ours_alone()


@on_ranks(4)
def subgroups_have_orders_of_their_own() -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = dist.new_group([3, 0])
    mine = halves[rank() // 2]
    x = torch.ones(3)
    dist.all_reduce(x, group=mine)
    assert x.tolist() == [2.0] * 3
    if rank() in (0, 3):
        y = torch.tensor([float(rank())])
        dist.broadcast(y, src=3, group=crossed)
        assert y.item() == 3
        out = [torch.empty(1), torch.empty(1)]
        dist.all_gather(out, torch.tensor([float(rank())]), group=crossed)
        assert [t.item() for t in out] == [0, 3]
    again, _ = dist.new_subgroups(2)
    dist.barrier(again)
    dist.destroy_process_group(mine)
    dist.barrier()
    assert type(dist.group.WORLD).__name__ == "FarandoleProcessGroup"
    assert dist.get_backend(again) == "farandole"
    ours_alone()


@on_ranks(2)
def mistakes_are_refused_and_the_group_lives_on() -> None:
    with pytest.raises(fd.Mismatch):
        dist.all_reduce(torch.ones(3 + rank()))
    with pytest.raises(fd.Mismatch):
        dist.all_reduce(torch.ones(3, dtype=torch.float32 if rank() == 0 else torch.float64))
    with pytest.raises(fd.Mismatch):
        dist.broadcast(torch.ones(3), rank())
    work = dist.all_reduce(torch.ones(3 + rank()), async_op=True)
    with pytest.raises(fd.Mismatch):
        work.wait()
    assert isinstance(work.exception(), fd.Mismatch)
    assert not work.is_success()
    future = dist.all_reduce(torch.ones(3 + rank()), async_op=True).get_future()
    with pytest.raises(fd.Mismatch):
        future.wait()
    refused(lambda: dist.all_reduce(torch.ones(3, device="meta")), "meta")
    refused(lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e5m2)), "float8_e5m2")
    refused(lambda: dist.all_gather_into_tensor(torch.empty(3), torch.empty(2)), "2 times")
    refused(lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 1], [1, 2]), "rows")
    dist.barrier()
    ours_alone()


@on_ranks(2)
def gloo_runs_what_we_do_not_have_and_is_counted() -> None:
    from farandole.torch.distributed import fallbacks

    bitwise = dist.AllreduceOptions()
    bitwise.reduceOp = Op.BOR
    x = torch.tensor([5 + rank()])
    dist.all_reduce(x, Op.BXOR)
    assert x.item() == 5 ^ 6
    dist.all_reduce(x, Op.BOR)
    bits, ones = torch.tensor([1 << rank()]), torch.ones(2)
    with dist.distributed_c10d._coalescing_manager(
        device=torch.device("cpu"), async_ops=True
    ) as manager:
        works = [dist.group.WORLD.allreduce([ones]), dist.group.WORLD.allreduce([bits], bitwise)]
    manager.wait()
    assert works[0].is_completed()
    assert (ones.tolist(), bits.tolist()) == ([2.0, 2.0], [3])
    indices = torch.tensor([[rank(), 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (4,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1, 1, 2, 0]
    assert fallbacks() == {
        "all_reduce with BXOR": 1, "all_reduce with BOR": 2, "all_reduce of sparse tensors": 1,
    }  # fmt: skip


@on_ranks(2)
def zz_timeouts_name_the_missing(limit: float = 0.5) -> None:
    """Last: they fail their groups."""
    lonely = dist.new_group()
    if rank() == 0:
        with pytest.raises(fd.Stalled, match="rank 1") as caught:
            dist.monitored_barrier(lonely, timedelta(seconds=limit))
        assert caught.value.values["missing"] == [1]
    dist.monitored_barrier(gloo())
    other = dist.new_group(timeout=timedelta(seconds=limit))
    if rank() == 0:
        with pytest.raises(fd.Stalled, match="rank 1"):
            dist.all_reduce(torch.ones(1), group=other)
    dist.monitored_barrier(gloo())
    third = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit), third)
    if rank() == 0:
        with pytest.raises(fd.Stalled, match="rank 1"):
            dist.all_reduce(torch.ones(1), group=third)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=40), gloo())
    dist.monitored_barrier(gloo())
    x = torch.ones(1)
    dist.all_reduce(x)  # other groups live on
    assert x.item() == 2


test_on_ranks = make_tests(__name__, "torch", prepare=prepare)
