"""Parts: every value has one owner, whatever else is in the message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradzip.exchange.parts import GRAIN, LANES, Table, name_hash

SIZES = st.lists(
    st.one_of(st.integers(0, 8), st.integers(100, 5000), st.sampled_from([GRAIN, 4 * GRAIN, 4 * GRAIN - 1, 40_001])),
    max_size=12,
)
COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def named(sizes: list[int]) -> list[str]:
    return [f"layer.{i}.weight" for i in range(len(sizes))]


def owners_of_values(table: Table) -> list[np.ndarray]:
    """For each tensor, the owner of each of its values; fails where a value has none, or two."""
    found = [np.full(size, -1) for size in table.sizes]
    for part in table.parts:
        assert 0 <= part.start < part.stop <= table.sizes[part.tensor]
        assert 0 <= part.owner < table.owners
        here = found[part.tensor][part.start : part.stop]
        assert (here == -1).all(), f"{part} overlaps with another"
        here[:] = part.owner
    assert all((tensor >= 0).all() for tensor in found)
    return found


def check_places(table: Table) -> None:
    for owner in range(table.owners):
        end = 0
        for part in table.of_owner(owner):
            assert part.owner == owner
            assert part.place == -(-end // LANES) * LANES, "parts follow each other at the next multiple of 32"
            end = part.place + part.numel
        assert table.length(owner) == -(-end // LANES) * LANES


@given(SIZES, COUNTS)
def test_every_value_has_exactly_one_owner(sizes: list[int], counts: list[int]) -> None:
    table = Table.of(named(sizes), sizes, counts)
    assert table.owners == np.prod(counts)
    owners_of_values(table)
    check_places(table)
    assert sum(table.numel(owner) for owner in range(table.owners)) == sum(sizes)


@given(SIZES, st.integers(1, 6))
def test_owners_do_not_depend_on_the_message(sizes: list[int], world: int) -> None:
    names = named(sizes)
    together = owners_of_values(Table.of(names, sizes, [world]))
    for name, size, among_others in zip(names, sizes, together):
        (alone,) = owners_of_values(Table.of([name], [size], [world]))
        assert (alone == among_others).all()


@given(SIZES, st.integers(1, 4), st.integers(1, 4))
def test_dealing_twice_is_dealing_to_groups_of_groups(sizes: list[int], hosts: int, local: int) -> None:
    names = named(sizes)
    at_once, first = Table.of(names, sizes, [hosts, local]), Table.of(names, sizes, [hosts])
    for host in range(hosts):
        second = first.within(host, [local])
        for rank in range(local):
            expected = [part._replace(owner=rank) for part in at_once.of_owner(host * local + rank)]
            assert list(second.of_owner(rank)) == expected


@given(SIZES, st.integers(1, 4), st.data())
def test_given_owners_get_whole_tensors(sizes: list[int], world: int, data: st.DataObject) -> None:
    owners = [data.draw(st.integers(0, world - 1)) for _ in sizes]
    table = Table.owned(named(sizes), sizes, owners, world)
    check_places(table)
    assert [set(found.tolist()) for found in owners_of_values(table)] == [
        {o} if n else set() for n, o in zip(sizes, owners)
    ]


@given(
    SIZES, st.integers(1, 4), st.sampled_from([1, 64, 1000, 4096, 20_000, 1 << 30]), st.sampled_from([None, 1, 5000])
)
def test_chunks_hold_every_value_once_and_keep_its_owner(
    sizes: list[int], world: int, values: int, two_from: int | None
) -> None:
    table = Table.of(named(sizes), sizes, [world])
    whole = owners_of_values(table)
    chunks = table.chunks(values, two_from=two_from)
    for chunk in chunks:
        check_places(chunk)
        assert (chunk.names, chunk.sizes, chunk.owners) == (table.names, table.sizes, table.owners)
    parts = tuple(part for chunk in chunks for part in chunk.parts)
    joined = owners_of_values(Table(table.names, table.sizes, table.owners, parts, table.dealt))
    assert all((a == b).all() for a, b in zip(whole, joined))


def test_chunks_of_a_large_tensor_are_about_equal() -> None:
    table = Table.of(["a", "b", "c"], [3_000_000, 50, 1_000_000], [4])
    chunks = table.chunks(250_000)
    assert len(chunks) == 4
    for owner in range(4):
        lengths = [chunk.length(owner) for chunk in chunks]
        assert max(lengths) - min(lengths) <= 2 * 4096


def test_a_long_frame_on_a_device_is_two_chunks_of_which_the_second_is_shorter() -> None:
    short, long = (Table.of(["a", "b"], [size, 50], [4]) for size in (3_000_000, 6_000_000))
    assert len(short.chunks(1 << 21, two_from=1 << 20)) == 1
    first, second = long.chunks(1 << 21, two_from=1 << 20)
    for owner in range(4):
        assert first.numel(owner) / long.numel(owner) == pytest.approx(0.6, abs=0.01)
        assert second.numel(owner) < first.numel(owner)
    assert len(long.chunks(1 << 21, cuts=False, two_from=1 << 20)) == 1
    assert len(long.chunks(1 << 18, two_from=1 << 20)) == 6


def test_parts_begin_at_multiples_of_128() -> None:
    table = Table.of(["x"], [10_000], [3])
    assert sorted((part.start, part.stop) for part in table.parts) == [(0, 3456), (3456, 6912), (6912, 10_000)]


def test_first_parts_of_tensors_go_to_all_owners() -> None:
    names = [f"layers.{i}.weight" for i in range(400)]
    for counts in ([4], [2, 2]):
        table = Table.of(names, [4 * 1280 - 1] * 400, counts)
        firsts = [sum(part.start == 0 for part in table.of_owner(owner)) for owner in range(4)]
        assert all(60 < count < 140 for count in firsts)
        assert all(len(table.of_owner(owner)) == 400 for owner in range(4))
        begin = [part.owner for part in table.parts if (part.tensor, part.start) == (0, 0)]
        assert counts == [2, 2] or begin == [name_hash(names[0]) % 4]


def test_small_tensors_go_whole_to_an_owner_by_their_name() -> None:
    table = Table.of(["bias", "scale"], [4 * GRAIN - 1, 1], [4])
    assert {part.owner for part in table.parts if part.tensor == 0} == {name_hash("bias") % 4}
    assert [part.numel for part in table.parts if part.tensor == 1] == [1]
    names = [f"layers.{i}.bias" for i in range(400)]
    for counts in ([4], [2, 2]):
        spread = Table.of(names, [10] * 400, counts)
        assert all(60 < len(spread.of_owner(owner)) < 140 for owner in range(4)), "every rank gets its share of them"


@pytest.mark.parametrize("sizes", [[], [0], [0, 0], [1], [0, 1, 0]])
def test_empty_messages_and_tensors(sizes: list[int]) -> None:
    table = Table.of(named(sizes), sizes, [4])
    assert len(table.parts) == sum(size > 0 for size in sizes)
    assert table.columns().tensor.dtype == np.int64
    assert sum(table.length(owner) for owner in range(4)) == LANES * len(table.parts)
    assert table.chunks(1)


def test_columns_are_the_parts() -> None:
    table = Table.of(["a", "b"], [5000, 3], [4])
    for owner in (None, 0, 1, 2, 3):
        parts = table.parts if owner is None else table.of_owner(owner)
        rows = [(t, s, s + n, o, p) for t, s, n, o, p in zip(*(column.tolist() for column in table.columns(owner)))]
        assert rows == [tuple(part) for part in parts]


def test_digests_differ_where_tables_do() -> None:
    tables = [Table.of(["a", "b"], [5000, 3], [4]), Table.of(["a", "b"], [5000, 3], [2]), Table.of(["a"], [5000], [4])]
    tables.append(Table.of(["a", "c"], [5000, 3], [4]))
    assert len({table.digest for table in tables}) == len(tables)
    assert Table.of(["a"], [5000], [4]).digest == tables[2].digest
