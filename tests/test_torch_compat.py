"""Each private torch interface does what hgc relies on; a failure here names what a new torch release has changed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sympy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hgc import _torch_compat as compat
from hgc.backends.parity.threads import run_ranks


def on_world(use: object) -> list[Tensor]:
    def rank_main(rank: int) -> Tensor:
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        return use(torch.arange(4.0) + 10 * rank, str(dist.group.WORLD.group_name))  # type: ignore[operator, no-any-return]

    return run_ranks(2, rank_main)


def test_all_reduce() -> None:
    assert on_world(lambda x, name: compat.all_reduce(x, "sum", name))[1].tolist() == [10.0, 12.0, 14.0, 16.0]
    assert on_world(lambda x, name: compat.all_reduce(x, "max", name))[0].tolist() == [10.0, 11.0, 12.0, 13.0]


def test_a_shift_reaches_the_next_rank() -> None:
    def use(x: Tensor, name: str) -> Tensor:
        return compat.finished(compat.start_shift(x.view(2, 2), int(x[0]) // 10, 2, name))

    assert [shifted.tolist() for shifted in on_world(use)] == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def test_all_reduce_leaves_its_input_alone() -> None:
    def use(x: Tensor, name: str) -> Tensor:
        compat.all_reduce(x, "sum", name)
        return x

    assert on_world(use)[0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_all_reduce_that_is_waited_for_later() -> None:
    assert on_world(lambda x, name: compat.finished(compat.start_all_reduce(x, "sum", name)))[0].tolist() == [10.0, 12.0, 14.0, 16.0]


def test_all_reduce_that_waits_when_read() -> None:
    def use(x: Tensor, name: str) -> Tensor:
        lazy = compat.finished_when_read(compat.start_all_reduce(x, "sum", name))
        plain = compat.settled(lazy.detach())
        assert type(plain) is Tensor
        assert compat.settled(plain) is plain
        return torch.stack([lazy + 1, plain])

    assert on_world(use)[0].tolist() == [[11.0, 13.0, 15.0, 17.0], [10.0, 12.0, 14.0, 16.0]]


def test_gathers_and_scatters_keep_rank_order() -> None:
    assert on_world(lambda x, name: compat.all_gather_flat(x[:2], 2, name))[0].tolist() == [0.0, 1.0, 10.0, 11.0]
    assert [x.tolist() for x in on_world(lambda x, name: compat.reduce_scatter_flat(x, 2, name))] == [[10.0, 12.0], [14.0, 16.0]]
    exchanged = on_world(lambda x, name: compat.all_to_all_flat(x, 2, name))
    assert [x.tolist() for x in exchanged] == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]


def test_threads_are_ranks_of_separate_worlds() -> None:
    assert run_ranks(3, lambda rank: (dist.get_rank(), dist.get_world_size())) == [(0, 3), (1, 3), (2, 3)]
    assert not dist.is_initialized()


def test_abort_frees_ranks_that_wait() -> None:
    def rank_main(rank: int) -> None:
        if rank == 1:
            raise ValueError("ill")
        dist.barrier()

    with pytest.raises(ValueError, match="ill"):
        run_ranks(2, rank_main)
    assert not any("rank_main" in thread.name for thread in threading.enumerate())


def test_local_store() -> None:
    store = compat.local_store()
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_copy_all() -> None:
    targets = [torch.zeros(3), torch.zeros(2, 2)]
    compat.copy_all(targets, [torch.ones(3), torch.full((2, 2), 2.0)])
    compat.copy_all([], [])
    assert [target.unique().item() for target in targets] == [1.0, 2.0]


class _Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("lost", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.sum() + (2 if x.shape[0] % 2 else 3)
        return self.lin(x) * scale


def _exported() -> tuple[torch.export.ExportedProgram, Any]:
    mode = compat.fake_tensor_mode()
    model = _Doubles()
    with mode:
        for name in ("weight", "bias"):
            real = getattr(model.lin, name)
            setattr(model.lin, name, nn.Parameter(torch.empty(real.shape, device="cpu")))
    with compat.exporting_in(mode):
        exported = torch.export.export(model, (torch.empty(5, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    return exported, mode


def test_a_model_of_fake_tensors_is_exported_in_its_own_mode() -> None:
    exported, _ = _exported()
    linear = next(node for node in exported.graph.nodes if "linear" in str(node.target))
    assert isinstance(linear.target, compat.OpOverload)
    assert isinstance(linear.meta["val"].shape[0], torch.SymInt)
    assert linear.meta["val"].device.type == "cpu"
    regions = [node for node in exported.graph.nodes if isinstance(node.target, compat.HigherOrderOperator)]
    assert [node.target.__name__ for node in regions] == ["wrap_with_set_grad_enabled"]


def test_size_guards_tell_what_a_branch_assumed() -> None:
    _, mode = _exported()
    (guard,) = compat.size_guards(mode)
    (symbol,) = guard.free_symbols
    assert [bool(guard.xreplace({symbol: sympy.Integer(size)})) for size in (5, 6)] == [True, False]
    assert guard.atoms(compat.size_functions.Mod, compat.size_functions.PythonMod)


def test_modules_tell_their_buffers_and_hooks() -> None:
    model = _Doubles()
    assert compat.non_persistent_buffers(model) == {"lost"}
    assert compat.forward_hooks(model) == []
    model.register_forward_hook(print)
    model.register_forward_pre_hook(repr)
    assert compat.forward_hooks(model) == [repr, print]


def test_trees_are_taken_apart_and_put_together() -> None:
    leaves, structure = compat.flatten_tree(({"a": 1, "b": [2, None]}, 3))
    assert leaves == [1, 2, None, 3]
    assert compat.unflatten_tree([4, 5, 6, 7], structure) == ({"a": 4, "b": [5, 6]}, 7)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))])
def test_the_flash_kernel_gives_and_takes_softmax_sums(device: str) -> None:
    """Columns in two halves: results merged by their sums, gradients from the merged result."""
    dtype, tolerance = (torch.float64, 1e-12) if device == "cpu" else (torch.bfloat16, 3e-2)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 8, 16, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(4))
    assert compat.has_fused_attention(q, v)
    exact = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(2, 3) * 0.3
    expected = scores.softmax(-1) @ exact[2]
    wanted = torch.autograd.grad(expected, exact, grad.double().cpu())
    halves = [compat.fused_attention(q, k[:, :, part], v[:, :, part], False, 0.3) for part in (slice(0, 4), slice(4, 8))]
    sums = torch.logaddexp(halves[0][1], halves[1][1])
    out = sum(h[0] * torch.exp(h[1] - sums).unsqueeze(-1).to(dtype) for h in halves)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(sums.double().cpu(), scores.logsumexp(-1), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    parts = [compat.fused_attention_backward(grad, q, k[:, :, p], v[:, :, p], out, sums, False, 0.3) for p in (slice(0, 4), slice(4, 8))]
    found = (parts[0][0] + parts[1][0], *(torch.cat([parts[0][i], parts[1][i]], 2) for i in (1, 2)))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=tolerance, atol=tolerance)


def test_symbolic_sizes_go_through_operators() -> None:
    mode = compat.symbolic_mode()
    b, s = compat.symbolic_size(mode, 5), compat.symbolic_size(mode, 5)
    name = str(s)
    assert str(b) != name
    with compat.running_in(mode):
        x = torch.empty(b, s, 4)
        padded = torch.ops.aten.pad.default(x, [0, 0, 0, 1])
        assert str(padded.shape[1]) == f"{name} + 1"
        assert str(x.untyped_storage().nbytes()) == f"16*{b}*{name}"
        assert compat.fixed_sizes(mode) == []
        assert x[:, : int(s)].shape[1] == 5
    assert compat.fixed_sizes(mode) == [name]


def test_symbolic_mode_refuses_to_look_at_data() -> None:
    mode = compat.symbolic_mode()
    with compat.running_in(mode):
        x = torch.empty(compat.symbolic_size(mode, 5))
        with pytest.raises(Exception, match="_local_scalar_dense"):
            x.tolist()
        with pytest.raises(Exception, match="nonzero"):
            x.nonzero()


def test_storage_keys_tell_shared_memory() -> None:
    with compat.running_in(compat.symbolic_mode()):
        x = torch.empty(4, 4)
        y = x + 1
        assert compat.storage_key(x) == compat.storage_key(x.t()[1:]) != compat.storage_key(y)


def test_watched_calls_and_their_flops() -> None:
    mode = compat.symbolic_mode()
    n = compat.symbolic_size(mode, 7)
    found: list[tuple[str, str]] = []
    with compat.running_in(mode):
        x, w = torch.empty(n, 3), torch.empty(5, 3, requires_grad=True)
        with compat.watching_calls(lambda f, a, k, r: found.append((f.name(), str(compat.counted_flops(f, a, k, r))))):
            torch.ops.aten.linear.default(x, w).sum().backward()
    assert [call for call in found if call[1] != "0"] == [("aten::mm", f"30*{n}")] * 2
    assert ("aten::sum", "0") in found


def test_backward_in_two_halves() -> None:
    """Gradients of inputs first, those of parameters later, equal to the whole; a result that is a view can be given."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(second(first(x).tanh()).view(12).sum(), [x, *first.parameters(), *second.parameters()])
    result = second(first(x).tanh()).view(12)
    parameters = [*first.parameters(), *second.parameters()]
    assert compat.backward_splits([result], [x])
    (found,), rest = compat.backward_of_inputs([result], [torch.ones(12)], [x], parameters)
    assert found is not None
    torch.testing.assert_close(found, expected[0])
    assert all(parameter.grad is None for parameter in parameters)
    compat.backward_of_parameters(parameters, rest)
    for parameter, gradient in zip(parameters, expected[1:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_result_past_all_inputs_does_not_split() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    assert not compat.backward_splits([layer(x), layer.weight * 2], [x])


def test_intercepted_collectives() -> None:
    """What hgc's operators, lazy results and torch.distributed send is seen inside, and not afterwards."""
    seen: list[str] = []

    def functional(name: str, call: Any, args: tuple[Any, ...]) -> Any:
        seen.append(name)
        return call(*args)

    def distributed(name: str, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(f"dist.{name}")
        return call(*args, **kwargs)

    def rank_main(rank: int) -> float:
        name = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        with compat.intercepted_collectives(functional, distributed):
            total = compat.all_reduce(torch.ones(2), "sum", name)
            lazy = compat.settled(compat.finished_when_read(compat.start_all_reduce(total, "sum", name)))
            dist.all_reduce(lazy)
        compat.all_reduce(lazy, "sum", name)
        dist.all_reduce(lazy)
        return float(lazy.sum())

    assert run_ranks(1, rank_main) == [2.0]
    assert seen == ["all_reduce", "wait_tensor", "all_reduce", "wait_tensor", "dist.all_reduce"]


def test_gathers_of_fsdp_run_in_named_contexts() -> None:
    seen: list[str] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    def rank_main(rank: int) -> None:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with compat.named_gathers(model, lambda: around("gather"), lambda: around("scatter")):
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()

    run_ranks(2, rank_main)
    assert seen[0] == "gather"
    assert set(seen) == {"gather", "scatter"}


def test_backward_in_two_halves_of_a_parameter_that_is_used_far_apart() -> None:
    """One that meets the input's way at several places, and shares a part of its own way with others, counts once."""
    torch.manual_seed(0)
    bias, table, far = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
    x = torch.randn(4, 4, requires_grad=True)
    parameters = [table, bias, *far.parameters()]

    def forward() -> torch.Tensor:
        front = torch.tanh(table * bias.exp()) @ table
        middle = torch.tanh(x @ front) + front
        return far(torch.tanh(middle * bias.exp()) + front) * bias

    expected = torch.autograd.grad(forward().sum(), [x, *parameters])
    for order in (parameters, parameters[::-1]):
        for parameter in parameters:
            parameter.grad = None
        (found,), rest = compat.backward_of_inputs([forward()], [torch.ones(4, 4)], [x], order)
        compat.backward_of_parameters(order, rest)
        assert found is not None
        torch.testing.assert_close(found, expected[0])
        for parameter, gradient in zip(parameters, expected[1:], strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_meshes_end_with_their_models_once_shardings_are_forgotten() -> None:
    seen: list[weakref.ref[DeviceMesh]] = []

    def rank_main(_: int) -> None:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        seen.append(weakref.ref(mesh))
        fully_shard(nn.Linear(4, 4), mesh=mesh)(torch.ones(2, 4)).sum().backward()
        del mesh
        compat.forget_shardings()

    run_ranks(2, rank_main)
    gc.collect()
    assert [mesh() for mesh in seen] == [None, None]


def test_function_modes_are_off_while_backward_calls_python() -> None:
    """What ``rt.recompute`` mends: a mode is listed where it is entered, and not in the second run of a checkpoint."""

    class Nothing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    seen: list[int] = []

    def function(x: Tensor) -> Tensor:
        seen.append(len(compat.function_modes()))
        return x.sin().cos()

    with Nothing() as mode:
        assert compat.function_modes() == [mode]
        checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [1, 0]
