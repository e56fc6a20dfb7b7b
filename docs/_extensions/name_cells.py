"""Run by every kernel of the site: name the files of cells, so that tables show cell_3.py:12.

A kernel names the code of a cell by a number and writes no file. With a file, the page of
`tapax.view` can show the source of a site.
"""


def _name_cells():
    import itertools
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp())
    numbers = itertools.count(1)

    def name_cell(raw_code, code, number):
        path = folder / f"cell_{next(numbers)}.py"
        path.write_text(raw_code)
        return str(path)

    get_ipython().compile.get_code_name = name_cell  # noqa: F821


_name_cells()
del _name_cells
