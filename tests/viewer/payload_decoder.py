"""An oracle that reads payloads with NumPy alone, as `tapax.viewer._format` specifies them."""

import base64
import json
import re
import zlib

import numpy as np

MISSING = np.float32(-(2.0**-149))
DTYPES = {"f32": "<f4", "f64": "<f8", "i32": "<i4", "u8": "u1"}


def inflate(blob):
    return zlib.decompress(blob, -15)


def column(entry, read):
    content = inflate(read(entry["blob"]))
    if entry["dtype"] == "utf8":
        return content.decode()
    count = int(np.prod(entry["shape"], dtype=int))
    array = np.frombuffer(content, DTYPES[entry["dtype"]])
    return array[entry.get("offset", 0) :][:count].reshape(entry["shape"])


def tile(content, codec, rows, columns):
    if codec == "f32":
        return np.frombuffer(content, "<f4").reshape(rows, columns)
    low, step, unit = np.frombuffer(content[: 12 * rows], "<f4").reshape(rows, 3, 1).swapaxes(0, 1)
    codes = np.frombuffer(content[12 * rows :], "u1").reshape(2, rows, columns).astype(np.int64)
    codes = codes[0] + 256 * codes[1]
    exponent = low.astype(float) + (codes - 5) * step.astype(float)
    with np.errstate(over="ignore"):
        numbers = np.where(unit == 0, np.exp(exponent), unit * np.sinh(exponent))
    for code, number in enumerate((MISSING, np.nan, np.inf, -np.inf, 0)):
        numbers[codes == code] = number
    return numbers.astype(np.float32)


def matrix(entry, read, level=0):
    """Return the sites of the rows, and the numbers at one of the levels."""
    chosen = entry["levels"][level]
    rows, columns = entry["rows"], chosen["columns"]
    numbers = np.empty((rows, columns), np.float32)
    blob = chosen["blob"]
    for top in range(0, rows, chosen["tileRows"]):
        for left in range(0, columns, chosen["tileColumns"]):
            shape = min(chosen["tileRows"], rows - top), min(chosen["tileColumns"], columns - left)
            content = inflate(read(blob))
            part = tile(content, chosen["codec"], *shape)
            numbers[top : top + shape[0], left : left + shape[1]] = part
            blob += 1
    sites = np.arange(rows) if entry["sites"] is None else column(entry["sites"], read)
    return sites, numbers


def numbers_by_name(subject, read):
    """Return an array over steps for each site, kind and statistic of a subject."""
    found = {}
    for statistic in subject["statistics"]:
        sites, numbers = matrix(statistic["matrix"], read)
        for site, row in zip(sites, numbers, strict=True):
            found[subject["sites"]["name"][site], statistic["of"], statistic["stat"]] = row
    return found


class Reader:
    """The state of a page: a header, and the updates that it has applied."""

    def __init__(self, header, read):
        self.read = read
        self.subjects = header["subjects"]
        self.names = [list(subject["sites"]["name"]) for subject in self.subjects]
        self.steps = [
            [] if s["steps"] is None else [int(x) for x in column(s["steps"], read)]
            for s in self.subjects
        ]
        self.numbers = [
            {name: list(row) for name, row in numbers_by_name(s, read).items()}
            for s in self.subjects
        ]
        self.messages = [subject["messages"] for subject in self.subjects]
        self.events = [subject["events"] for subject in self.subjects]
        self.revision = max([0, *(subject.get("revision", 0) for subject in self.subjects)])

    def apply(self, update):
        assert (update["format"], update["version"]) == ("tapax.page", 2)
        assert update["revision"] == self.revision + 1
        i, keep, steps = update["subject"], update["keep"], update["steps"]
        self.revision += 1
        self.names[i] += update["sites"]["name"]
        self.steps[i] = self.steps[i][:keep] + list(steps)
        numbers = self.numbers[i]
        for row in numbers.values():
            row[keep:] = [MISSING] * len(steps)
        for statistic in update["statistics"]:
            assert [level["codec"] for level in statistic["matrix"]["levels"]] == ["f32"]
            sites, rows = matrix(statistic["matrix"], self.read)
            for site, row in zip(sites, rows, strict=True):
                key = self.names[i][site], statistic["of"], statistic["stat"]
                numbers.setdefault(key, [MISSING] * (keep + len(steps)))[keep:] = row
        self.messages[i], self.events[i] = update["messages"], update["events"]


def read_saved(text):
    """Return the header of a saved file, and a function that returns its blobs."""
    found = re.findall(r'<script type="application/octet-stream" id="([\w-]+)">([^<]*)<', text)
    elements = {name: base64.b64decode(content) for name, content in found}
    header = json.loads(inflate(elements["tapax-header"]))
    return header, lambda number: elements[f"tapax-blob-{number}"]
