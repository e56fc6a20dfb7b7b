"""`view`: one page for a capture, a table of sites, or the log of a run."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from tapax._results import SiteTable, Taps
from tapax._sites import wrong_type
from tapax.monitoring._log import Log, open
from tapax.viewer._blobs import Blobs
from tapax.viewer._captures import Tokens, add_site_table, add_taps
from tapax.viewer._format import FORMAT, VERSION, Header, Message, Subject
from tapax.viewer._html import save_html
from tapax.viewer._runs import add_log
from tapax.viewer._site_columns import Sources

Viewable: TypeAlias = "Taps | SiteTable | Log | str | os.PathLike[str]"


@dataclasses.dataclass(frozen=True, eq=False)
class Page:
    """A page: its header and its blobs, as `tapax.viewer._format` specifies them."""

    header: Header
    blobs: Blobs

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to one HTML file, which opens from disk and makes no request.

        Args:
            path: the file, such as `"run.html"`; one that exists is replaced.

        Raises:
            OSError: if `path` cannot be written.
        """
        save_html(path, self.header, self.blobs)

    def __repr__(self) -> str:
        names = ", ".join(subject["name"] for subject in self.header["subjects"])
        return f"<Page of {names}; .save('page.html') writes it>"


def view(*what: Viewable, tokens: Tokens | None = None) -> Page:
    """Show what was captured or logged in the browser.

    Args:
        what: taps, a table of sites, a log, or the path of a log or of saved taps; several of
            them are shown together, and compared.
        tokens: the text of each token, by example and position, for views by token.

    Returns:
        A `Page`, whose `save` writes one self-contained HTML file.

    Raises:
        TypeError: if `what` is none of these.

    >>> import os, tempfile, jax.numpy as jnp, tapax
    >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
    >>> path = os.path.join(tempfile.mkdtemp(), "taps.html")
    >>> tapax.view(taps).save(path)
    """
    if not what:
        raise TypeError("tapax.view takes at least one capture, table of sites, log or path.")
    blobs = Blobs()
    sources = Sources(blobs)
    subjects = [_add(each, i, len(what), blobs, sources, tokens) for i, each in enumerate(what)]
    header: Header = {
        "format": FORMAT,
        "version": VERSION,
        "title": " and ".join(dict.fromkeys(subject["name"] for subject in subjects)),
        "subjects": subjects,
        "sources": sources.files,
        "blobs": len(blobs),
    }
    return Page(header, blobs)


def _add(
    what: Any, number: int, count: int, blobs: Blobs, sources: Sources, tokens: Tokens | None
) -> Subject:
    messages: list[Message] = []
    name = f" {'abcdefgh'[number] if number < 8 else number}" if count > 1 else ""
    if isinstance(what, (str, os.PathLike)):
        path = os.fspath(what)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            what = open(path)
        messages = [{"level": "warning", "text": str(each.message)} for each in caught]
        named = os.path.basename(os.path.normpath(path))
    else:
        named = ""
    if isinstance(what, Taps):
        subject = add_taps(what, named or f"capture{name}", blobs, sources, tokens)
    elif isinstance(what, SiteTable):
        subject = add_site_table(what, named or f"sites{name}", blobs, sources)
    elif isinstance(what, Log):
        subject = add_log(what, named or f"run{name}", blobs, sources)
    else:
        raise wrong_type(
            "tapax.view takes taps, a table of sites, a log, or the path of one, but was given",
            what,
        )
    subject = cast(dict[str, Any], subject)
    subject["messages"] = [*messages, *cast(Sequence[Message], subject["messages"])]
    return cast(Subject, subject)
