"""Every public name of the package documents itself: `help` alone must be enough."""

import pytest

import tapax
from tests.docs.public_names import find_faults, list_public

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", sorted(tapax.__all__))
def test_public_names_document_themselves(name):
    found = list_public(f"tapax.{name}", getattr(tapax, name))
    assert [fault for each in found for fault in find_faults(*each)] == []


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
