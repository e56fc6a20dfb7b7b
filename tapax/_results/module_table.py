"""`ModuleTable`: the modules of a model, in its order."""


class ModuleTable(tuple[tuple[str, type], ...]):
    """Paths and classes, in the order of the model; prints as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        from tapax._results.tables import modules_table

        return modules_table(self)
