"""`ByToken`: numbers by site and token for the page, such as the results of patching."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from tapax.viewer._blobs import Blobs
from tapax.viewer._format import Scale, Subject, TokenGrid, empty_subject
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns


@dataclasses.dataclass(frozen=True, eq=False)
class ByToken:
    """Numbers by site and token, which `tapax.view` shows as a map of layers and tokens.

    Attributes:
        numbers: An array [sites, positions], as `tapax.attribute.activation_patching` returns it,
            or [sites, examples, positions]. It is stored as [sites, examples, positions].
        sites: The names of the sites, one for each row; all names differ.
        tokens: The text of each token, by position, or by example and position.
        label: The name of the quantity, such as `"effect"`.
        unit: The unit of the numbers.
        texts: A text for each number, such as the likeliest token, in the shape of `numbers`.

    Raises:
        TypeError: If the numbers are complex.
        ValueError: If the shapes do not match, or two sites have one name.

    Example:
        >>> import numpy as np
        >>> from tapax.viewer import ByToken
        >>> effects = ByToken(np.zeros((2, 3)), ["h/0", "h/1"], tokens=["a", "b", "c"])
        >>> effects.numbers.shape, effects.tokens
        ((2, 1, 3), [['a', 'b', 'c']])
    """

    numbers: Any
    sites: Sequence[str]
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None
    label: str = "effect"
    unit: str = ""
    texts: Any = None

    def __post_init__(self) -> None:
        if np.iscomplexobj(self.numbers):
            raise TypeError("ByToken takes real numbers. Take the magnitude of complex ones.")
        numbers = np.asarray(self.numbers, np.float32)
        if numbers.ndim == 2:
            numbers = numbers[:, None]
        if numbers.ndim != 3 or len(numbers) != len(self.sites):
            raise ValueError(
                "ByToken takes numbers of shape [sites, positions] or [sites, examples, "
                f"positions], and a name for each site, but was given shape "
                f"{list(np.shape(self.numbers))} and {len(self.sites)} names."
            )
        if len(set(self.sites)) < len(self.sites):
            raise ValueError("ByToken takes a name for each site, but some are the same.")
        object.__setattr__(self, "numbers", numbers)
        tokens = self.tokens
        if tokens is not None:
            lines = [tokens] if all(isinstance(token, str) for token in tokens) else tokens
            tokens = [[str(token) for token in line] for line in lines]
            if [len(tokens), *map(len, tokens)] != [numbers.shape[1]] + len(tokens) * [
                numbers.shape[2]
            ]:
                raise ValueError(
                    f"ByToken was given numbers for {numbers.shape[1]} examples of "
                    f"{numbers.shape[2]} positions, but tokens of another shape."
                )
            object.__setattr__(self, "tokens", tokens)
        if self.texts is not None:
            texts = np.asarray(self.texts, object)
            if texts.size != numbers.size:
                raise ValueError("ByToken takes as many `texts` as there are numbers.")
            object.__setattr__(self, "texts", texts.reshape(numbers.shape))

    @classmethod
    def of_logits(
        cls,
        logits: Any,
        sites: Sequence[str],
        decode: Callable[[int], str] = str,
        tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    ) -> ByToken:
        """Find the likeliest tokens and their probabilities in the result of a logit lens.

        Args:
            logits: An array [sites, positions, vocabulary] or [sites, examples, positions,
                vocabulary].
            sites: The names of the sites, one for each row; all names differ.
            decode: A function from the number of a token to its text.
            tokens: The text of each input token, by position, or by example and position.

        Returns:
            A `ByToken` with the probabilities as `numbers`, and the likeliest tokens as `texts`.

        Raises:
            ValueError: If the shapes do not match, or two sites have one name.

        Example:
            >>> import numpy as np
            >>> from tapax.viewer import ByToken
            >>> logits = np.log([[[1.0, 3.0], [1.0, 1e-9]]])
            >>> lens = ByToken.of_logits(logits, ["h"], decode="ab".__getitem__)
            >>> lens.texts.tolist(), lens.numbers.round(2).tolist()
            ([[['b', 'a']]], [[[0.75, 1.0]]])
        """
        array = np.asarray(logits, np.float64)
        best = array.argmax(-1)
        shifted = array - array.max(-1, keepdims=True)
        numbers = 1 / np.exp(shifted).sum(-1)
        texts = np.array([decode(int(i)) for i in best.ravel()], object).reshape(best.shape)
        label = "probability of the likeliest token"
        return cls(numbers, sites, tokens, label, texts=texts)


def add_by_token(found: ByToken, name: str, blobs: Blobs, sources: Sources) -> Subject:
    """Make the subject of numbers by token."""
    numbers = found.numbers
    finite = numbers[np.isfinite(numbers)]
    scale: Scale = "diverging" if (finite < 0).any() else "linear"
    grid: TokenGrid = {
        "label": found.label,
        "unit": found.unit,
        "scale": scale,
        "sites": list(range(len(found.sites))),
        "rowLabels": list(found.sites),
        "examples": numbers.shape[1],
        "positions": numbers.shape[2],
        "data": blobs.add_array(numbers, "f32"),
    }
    if found.tokens is not None:
        grid["tokens"] = cast(Sequence[Sequence[str]], found.tokens)
    if found.texts is not None:
        places: dict[str, int] = {}
        cells = [places.setdefault(str(text), len(places)) for text in found.texts.ravel()]
        grid["cells"] = blobs.add_array(np.array(cells).reshape(numbers.shape), "i32")
        grid["texts"] = list(places)
    subject = empty_subject("taps", name)
    subject["sites"] = make_site_columns([SiteRow(site) for site in found.sites], sources)
    subject["tokens"] = [grid]
    return cast(Subject, subject)
