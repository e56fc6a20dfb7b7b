"""Tables of residuals: order, groups, totals and printing."""

import jax
import numpy as np

from tapax import Residual, ResidualTable


def residual(site, operation, line, size, **more):
    return Residual(
        site, operation, f"/home/me/model.py:{line}", (size,), np.dtype("uint8"), size, **more
    )


ROWS = [
    residual("net/a", "sin", 1, 10),
    residual("net/b", "exp", 2, 3000),
    residual("net/a", "exp", 2, 20, loops=("scan[4]",), name="ffn"),
]
GIVEN = [residual("params/w", "", 1, 500, kind="argument")]
TABLE = ResidualTable(ROWS, GIVEN)


def test_rows_come_largest_first():
    assert [r.nbytes for r in TABLE] == [3000, 20, 10]
    assert TABLE[0].site == "net/b" and len(TABLE) == 3
    assert [r.nbytes for r in TABLE[1:]] == [20, 10]


def test_arguments_do_not_count():
    assert TABLE.nbytes == 3030
    assert TABLE.policy_nbytes is None
    assert TABLE.arguments.nbytes == 500 and len(TABLE.arguments.arguments) == 0


def test_groups_add_up_to_the_table():
    for groups in (TABLE.by_site(), TABLE.by_operation(), TABLE.by_line()):
        assert sum(part.nbytes for part in groups.values()) == TABLE.nbytes
        assert [part.nbytes for part in groups.values()] == sorted(
            (part.nbytes for part in groups.values()), reverse=True
        )
    assert {site: part.nbytes for site, part in TABLE.by_site().items()} == {
        "net/b": 3000,
        "net/a": 30,
    }
    assert list(TABLE.by_operation()) == ["exp", "sin"]
    assert TABLE.by_line()["/home/me/model.py:2"].nbytes == 3020


def test_a_policy_has_a_separate_size():
    rows = [
        residual("a", "sin", 1, 8, kept_by_policy=False),
        residual("a", "dot", 1, 4, kept=False, kept_by_policy=True),
        residual("b", "dot", 1, 2, kept_by_policy=True),
    ]
    table = ResidualTable(rows, (), "dots")
    assert (table.nbytes, table.policy_nbytes) == (10, 6)
    assert [r.change for r in table] == ["recomputed", "kept instead", "kept"]
    groups = table.by_site()
    assert [(p.nbytes, p.policy_nbytes) for p in groups.values()] == [(8, 4), (2, 2)]
    assert "10 B, 6 B with dots" in repr(table) and "kept instead" in repr(table)
    assert "with dots" in repr(groups)


def test_an_argument_is_never_recomputed():
    row = residual("w", "", 1, 8, kind="argument", kept_by_policy=False)
    assert row.change == "not read"
    assert residual("w", "", 1, 8).change == ""


def test_it_prints_sizes_and_places():
    text = repr(TABLE)
    for part in (
        "3 kept values, 3.0 KiB",
        "2.9 KiB",
        "model.py:2",
        "scan[4]",
        "exp ffn",
        "uint8[20]",
    ):
        assert part in text
    assert "/home" not in text
    assert "500 B" in text
    assert "argument" in repr(TABLE.arguments)
    assert "net/b" in repr(TABLE.by_site()) and "model.py:2" in repr(TABLE.by_line())


def test_it_shows_as_a_tree_in_a_notebook():
    page = TABLE._repr_html_()
    assert "tapax" in page and "2.9 KiB" in page
    assert "exp" in TABLE.by_operation()._repr_html_()


def test_an_empty_table_prints():
    empty = ResidualTable()
    assert empty.nbytes == 0 and not empty
    assert "0 kept values, 0 B" in repr(empty)
    assert not empty.by_site() and repr(empty.by_site())


def test_equal_tables_are_equal():
    assert ResidualTable(ROWS, GIVEN) == TABLE != ResidualTable(ROWS)
    assert hash(ResidualTable(ROWS, GIVEN)) == hash(TABLE)


def test_a_table_is_a_leaf_of_a_pytree():
    assert jax.tree.leaves([TABLE]) == [TABLE]
