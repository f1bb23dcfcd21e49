"""Sum gradients over the data axes while backward is still running."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hgc._torch_compat import copy_all
from hgc.ir.ops.groups import Group

BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20


@dataclass(eq=False)
class _Bucket:
    """Gradients that travel together, followed by one flag for each that says whether this rank has it."""

    parameters: list[nn.Parameter]
    group: Group
    dtype: torch.dtype
    flat: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    flags: Tensor | None = None
    waiting: set[int] = field(default_factory=set)
    absent: list[int] = field(default_factory=list)
    work: dist.Work | None = None


class Reducer:
    """Bucketed asynchronous sums of gradients, for parameters given with the group to sum over, in order of first use.

    ``dtype``: in which they are summed, if not in the parameters' own; ``grad`` is left in it. ``begin`` before the backward whose end
    shall find summed gradients, ``finish`` after it. Buckets start in one fixed order on all ranks, each as soon as its gradients and
    all buckets before it are there. A parameter without gradient on this rank counts as zero; where no rank has one, ``grad`` stays
    ``None``. Gradients present at ``begin_step`` are added to, as in torch.
    """

    def __init__(
        self, parameters: Iterable[tuple[nn.Parameter, Group]], bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> None:
        self._given = list(parameters)
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._of: dict[nn.Parameter, tuple[_Bucket, int]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._trainable: tuple[bool, ...] = ()
        self._next = 0
        self._active = False
        self._before: dict[nn.Parameter, Tensor] = {}

    def begin_step(self) -> None:
        """Before the first micro-batch: put aside what earlier steps have left in ``grad``."""
        trainable = tuple(parameter.requires_grad for parameter, _ in self._given)
        if trainable != self._trainable:
            self._build(trainable)
        self._before = {}
        for parameter in self._of:
            if parameter.grad is not None:
                self._before[parameter] = parameter.grad.clone()  # it may live in a bucket that is about to be overwritten
                parameter.grad = None

    def begin(self) -> None:
        """Before the last micro-batch's backward."""
        self._active, self._next = True, 0
        for bucket in self._buckets:
            bucket.waiting, bucket.work, bucket.absent = set(range(len(bucket.parameters))), None, []

    def finish(self) -> None:
        """After the last backward: start what is left, wait for all, and leave the sums in ``grad``."""
        self._active = False
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            self._restore_absent(bucket)
        for parameter, before in self._before.items():
            parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self._before = {}

    def _restore_absent(self, bucket: _Bucket) -> None:
        if not bucket.absent:
            return
        assert bucket.flags is not None
        present = bucket.flags.tolist()
        for index in bucket.absent:
            if present[index]:
                bucket.parameters[index].grad = bucket.views[index]

    def _build(self, trainable: tuple[bool, ...]) -> None:
        for handle in self._handles:
            handle.remove()
        self._trainable, self._buckets, self._of = trainable, [], {}
        open_buckets: dict[tuple[str, torch.dtype, torch.device], tuple[_Bucket, int]] = {}  # bucket, bytes that still fit
        for parameter, group in reversed(self._given):
            if not parameter.requires_grad:
                continue
            dtype = self._dtype or parameter.dtype
            key = (group.name, dtype, parameter.device)
            size = parameter.numel() * dtype.itemsize
            bucket, room = open_buckets.get(key, (None, 0))
            if bucket is None or size > room:
                # the first is small, so that communication starts early; more of them would cost more than the overlap gains
                room = self._bucket_bytes if key in open_buckets else min(FIRST_BUCKET_BYTES, self._bucket_bytes)
                bucket = _Bucket([], group, dtype)
                self._buckets.append(bucket)
            bucket.parameters.append(parameter)
            open_buckets[key] = bucket, room - size
            self._of[parameter] = bucket, len(bucket.parameters) - 1
        hook = _weak_hook(WeakMethod(self._on_gradient))
        self._handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in self._of]  # type: ignore[no-untyped-call]

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._active:
            return
        assert isinstance(parameter, nn.Parameter)
        bucket, index = self._of[parameter]
        if bucket.work is not None:
            raise RuntimeError("a parameter got a second gradient after its sum had started; its uses must meet in one backward")
        bucket.waiting.discard(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if bucket.flat is None:
            _allocate(bucket)
        assert bucket.flat is not None
        assert bucket.flags is not None
        bucket.flags.fill_(1)
        gradients: list[Tensor] = []
        targets: list[Tensor] = []
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if parameter.grad is None:
                bucket.absent.append(index)
                view.zero_()
                bucket.flags[index] = 0
            else:
                gradients.append(parameter.grad)
                targets.append(view)
                parameter.grad = view
        copy_all(targets, gradients)
        bucket.work = dist.all_reduce(bucket.flat, group=bucket.group.handle, async_op=True)


def _weak_hook(method: WeakMethod[Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    """A hook that keeps its reducer alive no longer: the garbage collector cannot see the circle parameter - hook - reducer - parameter."""

    def hook(parameter: Tensor) -> None:
        found = method()
        if found is not None:
            found(parameter)

    return hook


def _allocate(bucket: _Bucket) -> None:
    first = bucket.parameters[0]
    sizes = [parameter.numel() for parameter in bucket.parameters]
    bucket.flat = torch.zeros(sum(sizes) + len(sizes), dtype=bucket.dtype, device=first.device)
    *pieces, bucket.flags = torch.split(bucket.flat, [*sizes, len(sizes)])
    bucket.views = [piece.view(parameter.shape) for piece, parameter in zip(pieces, bucket.parameters, strict=True)]
