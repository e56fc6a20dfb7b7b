"""One self-contained HTML file: the page's bundle, the header and the blobs.

The file opens from disk, and its content security policy forbids all requests. The policy allows
the script by its hash, so that nothing else runs. The header and the blobs are base64, so no part
of a payload can end an element. The bundle comes right after the blobs that the first view needs:
the page draws while the browser is still reading the rest.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import os
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from tapax.viewer._assets import read_bundle
from tapax.viewer._blobs import Blobs
from tapax.viewer._format import Header


def save_html(path: str | os.PathLike[str], header: Header, blobs: Blobs) -> None:
    """Write the file under another name and rename it, so that `path` never has half a page.

    A link stays a link to the file. A pipe or a device cannot be replaced by a file, so the page is
    written to it directly.
    """
    target = Path(os.path.realpath(path))
    is_special = target.exists() and not target.is_file()
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target if is_special else beside, "wb") as file:
            file.writelines(_write(header, blobs))
        if not is_special:
            os.replace(beside, target)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(
            f"The page cannot be written to {str(target)!r}: {why}. Choose a writable path."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def content_security_policy(script: str) -> str:
    """Return the policy of a page that runs only `script` and makes no requests."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}' blob:; worker-src blob:; "
        "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def make_document(header: Header, blobs: Blobs) -> bytes:
    """Make the whole file, for embedding in another document."""
    return b"".join(_write(header, blobs))


def server_document(token: str) -> str:
    """Make the page of the local server, which requests the bundle and the payload with `token`."""
    return (
        _head('<meta name="referrer" content="no-referrer">\n<title>tapax</title>\n')
        + f'<script src="page.js?token={token}"></script>\n</body>\n</html>\n'
    )


def _head(more: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{more}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<style>html,body{margin:0;height:100%}</style>\n</head>\n<body>\n"
        '<div id="tapax-page"></div>\n'
    )


def _write(header: Header, blobs: Blobs) -> Iterator[bytes]:
    script = read_bundle()
    content = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    compressor = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = compressor.compress(content) + compressor.flush()
    policy = content_security_policy(script)
    head = _head(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{html.escape(header['title'])} · tapax</title>\n"
    )
    yield head.encode()
    yield _element("tapax-header", packed)
    urgent = blobs.urgent
    yield from (_element(f"tapax-blob-{i}", blob) for i, blob in blobs if i in urgent)
    yield b"<script>" + script.encode() + b"</script>\n"
    yield from (_element(f"tapax-blob-{i}", blob) for i, blob in blobs if i not in urgent)
    yield b"</body>\n</html>\n"


def _element(name: str, content: bytes) -> bytes:
    start = f'<script type="application/octet-stream" id="{name}">'.encode()
    return start + base64.b64encode(content) + b"</script>\n"
