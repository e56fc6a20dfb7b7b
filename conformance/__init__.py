"""A scoreboard: the same programs through several libraries that look inside models.

- `problem` has the right answer of every case, in plain `jax.numpy`; `cases` lists the cases.
- `library` has the interface of a library, and decides the marks; `example` is a small library.
- `models_*` write the cases in a framework; `framework` captures them with tapax.
- `library_*` answer the cases with one library each.
- `columns`, `run` and `report` measure all libraries and write the tables of `docs/conformance.md`.
"""
