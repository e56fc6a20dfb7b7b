"""Every public name of the package documents itself: `help` alone must be enough."""

import doctest
import importlib
import pkgutil

import pytest

import tapax
from tests.docs.public_names import find_faults, is_instance, list_public

pytestmark = pytest.mark.once

PUBLIC_MODULES = {
    module.name
    for module in pkgutil.iter_modules(tapax.__path__)
    if not module.name.startswith("_")
}


def find_public(name):
    thing = getattr(tapax, name, None) or importlib.import_module(f"tapax.{name}")
    return dict(list_public(f"tapax.{name}", thing))


@pytest.mark.parametrize("name", sorted({*tapax.__all__, *PUBLIC_MODULES}))
def test_public_names_document_themselves(name):
    found = find_public(name).items()
    assert [fault for each in found for fault in find_faults(*each)] == []


def test_modules_that_the_package_does_not_list_are_reached():
    assert "tapax.viewer.ByToken" in find_public("viewer")


def test_examples_of_reducers_run():
    """`doctest` reads the docstrings of functions and classes alone, not those of instances."""
    reducers = {name: each for name, each in find_public("reduce").items() if is_instance(each)}
    assert "tapax.reduce.rms" in reducers
    runner = doctest.DocTestRunner()
    for name, reducer in reducers.items():
        runner.run(doctest.DocTestParser().get_doctest(reducer.__doc__, {}, name, None, None))
    assert runner.summarize(verbose=False).failed == 0


def test_reducers_made_from_a_reducer_keep_its_docstring():
    rms = tapax.reduce.rms
    assert rms.__doc__.startswith("Compute the root mean square of a value")
    assert rms(axis=-1).total.named("size").__doc__ == rms.__doc__


def test_every_missing_part_is_found():
    def undocumented(x, *more):
        return x, more

    assert find_faults("f", undocumented) == [
        "f: the first line must be one sentence",
        "f: Args lacks *more",
        "f: Args lacks x",
        "f: Returns is missing",
        "f: Raises is missing",
        "f: Example is missing",
    ]

    def misnamed(x):
        """The identity.

        Args:
            y: A value.

        Returns:
            The value.

        Raises:
            TypeError: Never.

        Example:
            No code at all.
        """
        return x

    assert find_faults("f", misnamed) == [
        "f: the first sentence must start with a verb",
        "f: Args lacks x",
        "f: Args has y",
        "f: Example is missing",
    ]


def test_an_instance_without_a_docstring_of_its_own_is_found():
    reducer = tapax.reduce.topk(3)
    assert find_faults("topk", reducer) == ["topk: `help` shows the docstring of Reducer instead"]


def test_every_missing_part_of_a_class_is_found():
    class Box:
        """A value in a box."""

        def __init__(self, x):
            self.x = x

        @property
        def size(self):
            """The size."""

    assert find_faults("Box", Box) == [
        "Box: Example is missing",
        "Box: Args lacks x",
        "Box.size: no example of the class shows the property",
    ]
