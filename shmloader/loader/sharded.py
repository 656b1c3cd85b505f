"""``shmloader.ShardedDataLoader``: one global order, cut for the shards of a step and for ranks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe, Sampler

from shmloader.loader.dataloader import DataLoader
from shmloader.options import LastBatch, check_last_batch
from shmloader.probing import probe
from shmloader.sampling.checks import whole_number
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.ranks import is_cut_for_ranks, resolve_ranks
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.sampling.steps import Cut, Tail

_T_co = TypeVar("_T_co", covariant=True)

_TAILS: dict[str, Tail] = {"keep": "uneven", "discard": "drop", "rollover": "rollover"}


class ShardedDataLoader(DataLoader[_T_co]):
    """A loader for several GPUs: in one process, in many, or both.

    All ranks follow one global order of the samples, which depends on ``seed`` and the epoch
    alone. Global batch b is its run of ``batch_size * shards * world_size`` samples; rank r takes
    the r-th part of that, and shard i of a rank the i-th part of this. So the batches of all ranks
    and shards, one after the other, are the same sequence on any number of ranks, as long as the
    global batch is as large.

    Args:
        dataset: Map-style; a NumPy array, a tensor or a sequence will do.
        batch_size: Samples of each batch: of a rank, or of each shard of a rank.
        shuffle: Whether each epoch has a random order of its own. It takes no memory.
        sampler: Gives the order in place of these. Each rank draws all of it, under random
            streams (``random``, ``numpy.random``, torch) that depend on ``seed`` and the epoch. If
            it has ``set_epoch``, that is called with the epoch. With ``thread_pool=True``, samples
            that draw from these streams meanwhile change its order: give it a generator then.
        last_batch: ``tail`` in other words: "keep" is "uneven", "discard" is "drop"; "rollover"
            puts what the last global batch lacks to be full first in the next epoch.
        batch_sampler: Gives index lists; or lists of index lists, each of which makes a batch of
            its own: such a step is a **list** of batches, all in one slot. Both kinds may mix.
            They are dealt whole: step s of rank r is what it gives at ``s * world_size + r``.
        collate_fn: Makes a batch of samples.
        num_workers: Worker processes; 0 loads in this process; "auto" as with :class:`DataLoader`.
        pin_memory: Whether tensors are copied into page-locked memory.
        prefetch: Steps in flight; ``2 * num_workers`` if None.
        thread_pool: Whether workers are threads.
        devices: Each step is a list of batches, one for each of these devices, where it arrives;
            "cpu" leaves it on the CPU. With ``batch_sampler``, whose steps must be lists then,
            only where they arrive.
        num_shards: Each step is a list of so many batches. Not with ``batch_sampler``, which says
            itself what a step is.
        rank: This process's number, from 0. With ``world_size`` None: that of the default group of
            ``torch.distributed``, else of torchrun's ``RANK`` and ``WORLD_SIZE``, else 0 of 1.
        world_size: How many ranks there are.
        tail: What becomes of samples that do not fill the last global batch. "pad" (the default)
            repeats as many from the epoch's start, so that all batches of all ranks are full;
            "drop" leaves them out; "uneven" gives them as they are, so that a rank may have a
            shorter last batch, fewer shards in it, or one step fewer.
        seed: Orders the epoch, and sets the random streams of each sample by its position in the
            global order, as ``seed`` of :class:`shmloader.DataLoader` does: so a run is the same
            on any number of ranks, as long as the global batch is as large. Samples are fetched
            one by one, whatever ``__getitems__`` there is; the streams of ``random``,
            ``numpy.random`` and torch are not set with ``thread_pool=True``, where
            :func:`shmloader.sample_rng` is.
        generator: Shuffles as with torch; only for one rank, since ranks could not agree.
        batchify_fn: Another name for ``collate_fn``.
        options: Keyword arguments of :class:`shmloader.DataLoader`.

    Attributes:
        rank: Resolved.
        world_size: Resolved.

    Raises:
        ValueError, TypeError: For arguments that do not fit.
    """

    _may_shard = True

    def __init__(  # noqa: PLR0917 - the signature of GluonNLP's loader
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        last_batch: LastBatch | None = None,
        batch_sampler: Sampler[Any] | Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | Literal["auto"] = 0,
        pin_memory: bool = False,
        prefetch: int | None = None,
        thread_pool: bool = False,
        *,
        devices: Sequence[Any] | None = None,
        num_shards: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Literal["pad", "drop", "uneven"] | None = None,
        seed: int = 0,
        generator: torch.Generator | None = None,
        batchify_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        if batchify_fn is not None and collate_fn is not None:
            raise TypeError("batchify_fn is another name for collate_fn: give one of the two")
        _check_dataset(dataset)
        _check_samplers(sampler, batch_sampler)
        if batch_sampler is None and batch_size is None:
            raise ValueError("batch_size option is needed unless there is a batch_sampler")
        if devices is not None and options.get("device") is not None:
            raise ValueError("devices option is mutually exclusive with device")
        _check_prefetch(prefetch, num_workers, options)
        if "drop_last" in options:
            raise TypeError("ShardedDataLoader has no drop_last option: tail='drop' is the same")
        shards = _count_shards(devices, num_shards, has_batch_sampler=batch_sampler is not None)
        tail_rule = _choose_tail(tail, last_batch, batch_size, batch_sampler is not None)
        seed = whole_number(seed, "seed", minimum=0)
        ranks = resolve_ranks(rank, world_size)
        if generator is not None and ranks[1] > 1:
            raise ValueError(
                "generator option can not be given for more than one rank, since their orders "
                f"could not agree (world_size={ranks[1]}); seed= chooses the order"
            )
        self.devices = devices
        self.prefetch = prefetch
        super().__init__(
            dataset,
            1 if batch_size is None else batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn or batchify_fn,
            pin_memory,
            generator=generator,
            thread_pool=thread_pool,
            **options,
        )
        self.num_shards = num_shards
        self.rank, self.world_size = ranks
        self.tail = tail
        self.last_batch = last_batch
        self.seed = seed
        self.batchify_fn = batchify_fn
        share = 1 if batch_sampler is not None or batch_size is None else batch_size
        items: Iterable[Any] | None = sampler if batch_sampler is None else batch_sampler
        if generator is not None and shuffle:
            items = self.sampler  # torch's, which draws from it
        self._sample_seed = seed
        if items is None:
            self._use_seeded_sampler(seed)
        order = SeededOrder(
            batch_size if batch_sampler is None else None,
            shards,
            Cut(share * max(1, shards), *ranks),
            tail_rule,
            seed,
            length=len(dataset) if items is None else None,
            shuffle=shuffle,
            items=items,
            own_sampler=self._own_sampler(items),
            device_count=len(devices or ()),
            is_positioned=True,
        )
        self._plan = EpochPlan(order)
        self._share_carry_over()

    @property
    def _order(self) -> SeededOrder:
        """The global order, cut for this rank and its shards."""
        return cast("SeededOrder", self._present_plan.order)

    @property
    def _auto_collation(self) -> bool:
        """Whether an index is a list; torch's name."""
        return True

    @property
    def _is_in_ranks(self) -> bool:
        """Whether other ranks or shards have to have as many samples."""
        return self.world_size > 1 or self._order.is_sharded or self.devices is not None

    def _wanted_devices(self, device: object) -> list[Any]:
        return [device] if self.devices is None else list(self.devices)

    def _window_wanted(self) -> int | None:
        return self.prefetch

    @property
    def _has_steps(self) -> bool:
        return self.devices is not None

    @property
    def padding(self) -> int:
        """Samples of the current batch, or of all batches of the current step, that are repeats.

        They come last in it. Of the batch that ``next()`` gave last; 0 before the first.

        Raises:
            RuntimeError: With ``in_order=False``, where it is not known which batch that is.
        """
        if not self.in_order:
            raise RuntimeError("padding is known only with in_order=True")
        return self._order.repeats_in(self._present_plan.progress.position)


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, IterableDataset | IterDataPipe | MapDataPipe):
        raise ValueError(
            "ShardedDataLoader cuts an order of indices, which an IterableDataset or a data pipe "
            "does not have: let the dataset choose its part by rank, in a DataLoader"
        )


def _check_samplers(sampler: object, batch_sampler: object) -> None:
    for found in (sampler, batch_sampler, probe(batch_sampler, "sampler")):
        if isinstance(found, DistributedSampler) or is_cut_for_ranks(found):
            raise ValueError(
                f"{type(found).__name__} gives a part of the samples to each rank, and "
                "ShardedDataLoader would cut that part again: give it shuffle=True, or a sampler "
                "of all samples; or use DataLoader with yours"
            )


def _check_prefetch(prefetch: object, num_workers: int | str, options: dict[str, Any]) -> None:
    if prefetch is None:
        return
    whole_number(prefetch, "prefetch", minimum=1)
    if num_workers == 0:
        raise ValueError(
            "prefetch option could only be specified with num_workers > 0, but got "
            f"prefetch={prefetch!r}"
        )
    if options.get("prefetch_factor") is not None:
        raise ValueError("prefetch option is mutually exclusive with prefetch_factor")


def _count_shards(devices: object, num_shards: int | None, *, has_batch_sampler: bool) -> int:
    """Batches of a step, where the loader cuts it; 0 where it is no list, or cut already."""
    if num_shards is not None:
        if has_batch_sampler:
            raise ValueError(
                "num_shards option is mutually exclusive with batch_sampler, whose steps are lists "
                "of as many index lists as there are shards"
            )
        num_shards = whole_number(num_shards, "num_shards", minimum=1)
    if devices is None:
        return 0 if num_shards is None else num_shards
    if not isinstance(devices, list | tuple) or not devices:
        raise ValueError(f"devices option should be a list of devices, but got devices={devices!r}")
    if num_shards not in (None, len(devices)):
        raise ValueError(
            f"num_shards option should be the number of devices, {len(devices)}, where these are "
            f"given, but got num_shards={num_shards}"
        )
    return 0 if has_batch_sampler else len(devices)


def _choose_tail(
    tail: Tail | None, last_batch: LastBatch | None, batch_size: int | None, has_batch_sampler: bool
) -> Tail:
    if tail is not None and tail not in ("pad", "drop", "uneven"):
        raise ValueError(f"tail option should be 'pad', 'drop' or 'uneven', but got tail={tail!r}")
    if last_batch is None:
        return tail or "pad"
    if tail is not None:
        raise ValueError(
            f"tail and last_batch say the same in other words: give one of the two, but got "
            f"tail={tail!r} and last_batch={last_batch!r}"
        )
    check_last_batch(last_batch, batch_size, has_batch_sampler=has_batch_sampler)
    return _TAILS[last_batch]
