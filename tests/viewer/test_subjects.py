"""Payloads of findings, differences, residuals, numbers by token and datasets."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax.viewer import ByToken
from tapax.viewer._page import make_page
from tapax.viewer._subjects import Options
from tests.viewer.payload_decoder import column, numbers_by_name, read_saved

EVIL = "</script><img src=x onerror=alert(1)>"


def read(*what, **options):
    """Return the header of a page as JSON, and a function that returns blobs."""
    page = make_page(*what, options=Options(**options))
    return json.loads(json.dumps(page.header, allow_nan=False)), page._payload.read_blob


def test_a_finding_leads_to_its_site_iteration_and_line():
    def fn(x):
        def body(carry, i):
            return carry, tapax.sow(jnp.log(x - i), "h")

        with tapax.scope("net"):
            return jax.lax.scan(body, 0.0, jnp.arange(4, dtype=x.dtype))[1]

    finding = tapax.find_nonfinite(fn)(jnp.float32([2.5, 9.0]))
    header, blob = read(finding)
    (subject,) = header["subjects"]
    (event,) = subject["events"]
    assert subject["kind"] == event["kind"] == subject["name"] == "finding"
    assert subject["sites"]["name"] == [finding.path] and event["site"] == 0
    assert event["message"] == str(finding).splitlines()[0]
    assert event["iterations"] == [[finding.loops[0], 3]]
    assert (event["operation"], event["phase"]) == ("log", "forward")
    assert (event["index"], event["count"], event["shape"]) == ([0], 1, [2])
    assert event["operands"][0]["type"] == "float32[2]"
    file, line = event["source"]
    text = column(header["sources"][file]["text"], blob)
    assert "jnp.log(x - i)" in text.splitlines()[line - 1]


def test_a_difference_has_its_table_and_first_sites():
    def fn(x, wrong):
        h = tapax.sow(2 * x, "h")
        g = tapax.sow(h + wrong, "g")
        return tapax.sow(jnp.inf * (g - h - wrong) + g, "nans").sum()

    captured = tapax.capture(fn, grads=None)
    a, b = captured(jnp.ones(3), 0.0)[1], captured(jnp.ones(3), 0.5)[1]
    difference = tapax.diff(a, b)
    header, blob = read(difference)
    (subject,) = header["subjects"]
    entry = subject["difference"]
    names = [subject["sites"]["name"][each["site"]] for each in entry["entries"]]
    assert names == list(difference.values)
    assert entry["first"] == names.index(difference.first.name) and entry["firstGrad"] is None
    assert [each["differs"] for each in entry["entries"]] == [
        each.differs for each in difference.values.values()
    ]
    assert entry["entries"][1]["absolute"] == 0.5
    assert entry["entries"][1]["sentence"] == str(difference.values["g"])
    found = numbers_by_name(subject, blob)
    assert found["g", "value", "ulps"] == np.float32(difference.values["g"].ulps)
    assert found["h", "value", "ulps"] == 0


def test_a_difference_in_a_scan_has_the_error_of_every_iteration():
    def fn(x, wrong):
        def body(carry, i):
            return carry, tapax.sow(carry * (1 + i) + wrong * (i == 2), "h")

        return jax.lax.scan(body, x, jnp.arange(4.0))[1].sum()

    captured = tapax.capture(fn, grads=None)
    difference = tapax.diff(captured(1.0, 0.0)[1], captured(1.0, 0.5)[1])
    header, blob = read(difference)
    (subject,) = header["subjects"]
    assert subject["sites"]["name"] == [f"h[{i}]" for i in range(4)]
    (entry,) = subject["difference"]["entries"]
    assert entry["site"] == 2 and entry["iteration"] == [2]
    errors = [x[0] for x in numbers_by_name(subject, blob).values()]
    np.testing.assert_array_equal(errors, difference.values["h"].ulps_by_iteration)


def test_a_difference_in_a_loop_without_iterations_has_a_row():
    def fn(x):
        return jax.lax.scan(lambda c, i: (tapax.sow(c + i, "h"), None), x, jnp.arange(0.0))[0]

    taps = tapax.capture(fn, grads=None)(1.0)[1]
    header, _ = read(tapax.diff(taps, taps))
    (subject,) = header["subjects"]
    assert subject["sites"]["name"] == ["h"]
    assert [each["differs"] for each in subject["difference"]["entries"]] == [False]


def test_residuals_are_sites_with_their_bytes_and_lines():
    def loss(w):
        return jnp.sum(jnp.sin(jnp.exp(w)) ** 2)

    table = tapax.residuals(loss)(jnp.ones((4, 8)))
    header, blob = read(table)
    (subject,) = header["subjects"]
    assert len(subject["sites"]["name"]) == len(set(subject["sites"]["name"])) == len(table)
    kept = [x[0] for x in numbers_by_name(subject, blob).values()]
    assert kept == [residual.nbytes for residual in table] == subject["sites"]["nbytes"]
    assert subject["statistics"][0]["unit"] == "bytes"
    assert sum(kept) == table.nbytes


def test_patching_results_are_shown_by_site_and_token():
    effects = np.array([[0.5, -0.25], [0.0, 1.0]])
    header, blob = read(ByToken(effects, ["h/0", "h/1"], ["The", EVIL], label="patching"))
    (grid,) = header["subjects"][0]["tokens"]
    assert (grid["label"], grid["scale"]) == ("patching", "diverging")
    assert (grid["rowLabels"], grid["tokens"]) == (["h/0", "h/1"], [["The", EVIL]])
    np.testing.assert_array_equal(column(grid["data"], blob), effects[:, None])


def test_a_logit_lens_shows_the_likeliest_token_of_every_site():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5, 7))
    lens = ByToken.of_logits(logits, ["h/0", "h/1"], lambda i: f"t{i}")
    header, blob = read(lens)
    (grid,) = header["subjects"][0]["tokens"]
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(column(grid["data"], blob), chances.max(-1), rtol=1e-6)
    texts = np.array(grid["texts"])[column(grid["cells"], blob)]
    expected = np.vectorize(lambda i: f"t{i}")(logits.argmax(-1))
    assert (texts == expected).all()


@pytest.mark.parametrize(
    ("numbers", "sites", "more", "text"),
    [
        (np.zeros(3), ["a"] * 3, {}, "numbers of shape"),
        (np.zeros((2, 3)), ["a"], {}, "but was given shape [2, 3] and 1 names"),
        (np.zeros((2, 3)), ["a", "a"], {}, "some are the same"),
        (np.zeros((2, 3)), ["a", "b"], {"tokens": ["x"]}, "1 examples of 3 positions"),
        (np.zeros((2, 3)), ["a", "b"], {"texts": ["x"]}, "as many `texts`"),
    ],
)
def test_numbers_by_token_of_shapes_that_do_not_fit_are_refused(numbers, sites, more, text):
    with pytest.raises(ValueError) as error:
        ByToken(numbers, sites, **more)
    assert text in str(error.value)


def test_complex_numbers_by_token_are_refused():
    with pytest.raises(TypeError, match="ByToken takes real numbers"):
        ByToken(np.ones((2, 3)) * 1j, ["a", "b"])


WIDTH, LENGTH = 6, 25


@pytest.fixture(scope="module")
def acts(tmp_path_factory):
    """Harvest a dataset of 8 examples with 25 tokens each."""
    table = np.random.default_rng(0).normal(size=(50, WIDTH)) * np.arange(1, WIDTH + 1)

    def model(tokens):
        return tapax.sow(jnp.asarray(table, jnp.float32)[tokens], "h")

    tokens = np.random.default_rng(1).integers(0, 50, (4, 2, LENGTH), np.int32)
    folder = tmp_path_factory.mktemp("harvested") / "acts"
    return tapax.harvest(model, list(tokens), to=folder, values="h", progress=False)


@pytest.mark.parametrize("by_path", [False, True])
def test_a_dataset_shows_its_columns_rows_and_most_active_contexts(acts, by_path):
    direction = np.array([1.0, -2, 0, 0, 0, 1])
    directions = {"a latent": ("h", direction), "neuron": ("h", 3)}
    header, blob = read(
        acts.path if by_path else acts, directions=directions, decode=lambda i: f"t{i}"
    )
    h, tokens = np.asarray(acts["h"][:], float), np.asarray(acts["token"][:])
    (subject,) = header["subjects"]
    dataset = subject["dataset"]
    assert (subject["name"], subject["kind"], dataset["rows"]) == ("acts", "activations", 200)
    names = [each["name"] for each in dataset["columns"]]
    assert sorted(names) == ["batch", "example", "h", "position", "token"]
    assert dataset["sample"]["cells"][5][names.index("token")] == f"t{tokens[5]}"
    for top, scores in zip(dataset["tops"], (h @ direction, h[:, 3]), strict=True):
        order = np.argsort(-scores, kind="stable")[:16]
        assert [each["row"] for each in top["contexts"]] == order.tolist()
        first = top["contexts"][0]
        begin = order[0] // LENGTH * LENGTH  # within its example
        around = slice(max(begin, order[0] - 10), min(begin + LENGTH, order[0] + 11))
        np.testing.assert_allclose(first["activations"], scores[around], rtol=1e-6)
        assert first["tokens"] == [f"t{i}" for i in tokens[around]]
    found = numbers_by_name(subject, blob)
    rms = np.sqrt(np.mean(h**2))
    np.testing.assert_allclose(found["h", "value", "rms"], rms, rtol=1e-6)


@pytest.mark.parametrize(
    "x", [[1.0, np.inf, -np.inf, 2.0], [np.nan, 1.0], [np.nan, np.nan]], ids=str
)
def test_extremes_of_a_capture_are_those_of_numpy(x):
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"))(jnp.array(x, jnp.float32))
    header, blob = read(taps)
    found = numbers_by_name(header["subjects"][0], blob)
    np.testing.assert_array_equal(found["h", "value", "min"], np.min(x))
    np.testing.assert_array_equal(found["h", "value", "max"], np.max(x))


def test_contexts_show_numbers_that_are_not_finite_and_rows_that_were_dropped(tmp_path):
    x = jnp.array([[1.0], [jnp.nan], [5.0], [jnp.inf], [-jnp.inf], [2.0]])
    with pytest.warns(UserWarning, match="not finite"):
        acts = tapax.harvest(
            lambda x: tapax.sow(x, "h"),
            [x[None]],
            to=tmp_path,
            keep=np.array([[True, True, True, True, True, True]]),
            beside=lambda _: {
                "position": np.array([[0, 1, 2, 5, 6, 7]]),
                "token": np.arange(6)[None],
            },
        )
    header, _ = read(acts, directions={"neuron": ("h", 0)})
    first = header["subjects"][0]["dataset"]["tops"][0]["contexts"][0]
    assert first["row"] == 2
    assert first["activations"] == [1, "NaN", 5, "Infinity", "-Infinity", 2]
    assert first["tokens"] == ["0", "1", "2", "… 3", "4", "5"]


def test_a_dataset_without_directions_shows_the_neuron_that_varies_most(acts):
    header, _ = read(acts)
    (top,) = header["subjects"][0]["dataset"]["tops"]
    h = np.asarray(acts["h"][:])
    neuron = int(h.var(0).argmax())
    assert top["label"] == f"h, neuron {neuron}"
    assert top["contexts"][0]["row"] == int(h[:, neuron].argmax())


@pytest.mark.parametrize("direction", [6, -1, np.zeros(5), 0.5])
def test_a_direction_that_does_not_fit_its_site_is_refused(acts, direction):
    with pytest.raises(ValueError, match="a neuron below 6, or a vector of 6 numbers"):
        read(acts, directions={"bad": ("h", direction)})


@pytest.mark.parametrize(
    ("directions", "text"),
    [
        ([("h", 0)], "takes a dict from a label"),
        ({"x": ("h", 0, 1)}, "but for 'x' is ('h', 0, 1)"),
        ({"x": "h"}, "but for 'x' is 'h'"),
    ],
)
def test_directions_of_another_form_are_refused(acts, directions, text):
    with pytest.raises(TypeError) as error:
        read(acts, directions=directions)
    assert text in str(error.value)


TOKENS = [["a", "b", "c"], ["d", "e", "f"]]


@pytest.fixture(scope="module")
def tokens_taps():
    return tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones((2, 3, 4)))[1]


def test_tokens_of_one_of_several_captures_are_enough(tokens_taps):
    other = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))[1]
    header, _ = read(other, tokens_taps, tokens=TOKENS)
    assert header["subjects"][1]["tokens"][0]["tokens"] == TOKENS


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["a", "b", "c"], "3 examples of 1 tokens, but no captured array is"),
        ([["a", "b"]], "these sizes: they begin with [2, 3]"),
        ([], "takes a list of strings for each example"),
        ([["a", "b", "c"], ["d"]], "all of one length, but is [['a'"),
        ([1, 2], "takes a list of strings for each example"),
        ("abc", "takes a list of strings for each example"),
    ],
)
def test_tokens_that_would_not_be_shown_are_refused(tokens_taps, tokens, text):
    with pytest.raises(ValueError) as error:
        read(tokens_taps, tokens=tokens)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "options", [{"tokens": TOKENS}, {"directions": {"x": ("h", 0)}}, {"decode": str}]
)
def test_options_that_apply_to_no_subject_are_refused(options):
    (name,) = options
    with pytest.raises(TypeError, match=f"`{name}` is for views of .*was given none"):
        read(tapax.Log(), **options)


def test_contexts_of_a_dataset_with_a_wide_column_for_examples(tmp_path):
    acts = tapax.harvest(
        lambda x: tapax.sow(x, "h"),
        [np.float32([[1, 2], [3, 4], [5, 6]])] * 2,
        to=tmp_path,
        beside=lambda batch: {"example": np.ones((3, 2), np.int32)},
    )
    header, _ = read(acts, directions={"x": ("h", 1)})
    first = header["subjects"][0]["dataset"]["tops"][0]["contexts"][0]
    assert (first["row"], first["activations"]) == (2, [2.0, 4.0, 6.0])  # within its batch


def test_a_dataset_without_rows_shows_its_columns(tmp_path):
    acts = tapax.harvest(
        lambda x: tapax.sow(x, "h"),
        [np.ones((2, 3), np.float32)],
        to=tmp_path,
        keep=lambda batch: np.zeros(2, bool),
    )
    dataset = read(acts)[0]["subjects"][0]["dataset"]
    assert dataset["rows"] == 0
    assert [column["name"] for column in dataset["columns"]] == ["batch", "example", "h"]
    assert [top["contexts"] for top in dataset["tops"]] == [[]]


@pytest.mark.parametrize("name", ["a\nb", "h[1,]", "h[,]", "a\nb/blocks/0"])
def test_names_of_any_characters_are_names(name):
    fn = lambda x: tapax.sow(x, name)
    for subject in (tapax.capture(fn)(1.0)[1], tapax.sites(fn)(1.0)):
        assert read(subject)[0]["subjects"][0]["sites"]["path"] == [name]


def test_a_dataset_that_is_not_complete_says_so(tmp_path):
    batches = [np.ones((2, 3), np.float32)] * 4
    given = {"to": tmp_path, "units": 4, "worker": (0, 2), "take_over": False}
    part = tapax.harvest(lambda x: tapax.sow(x, "h"), batches, **given)
    (message,) = read(part)[0]["subjects"][0]["messages"]
    assert message["text"] == "The dataset is not complete: 2 of 4 units."


@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
def test_arrays_without_a_mean_are_shown_without_warnings(number):
    fn = lambda x: tapax.sow(jnp.full((3, 3), x), "h")
    header, _ = read(tapax.capture(fn)(number)[1])
    assert header["subjects"][0]["arrays"][0]["rendering"]


def test_a_program_without_sites_says_so():
    with pytest.warns(UserWarning, match="has no sites"):
        sites = tapax.sites(lambda x: x)(1.0)
    (message,) = read(sites)[0]["subjects"][0]["messages"]
    assert message["text"] == "The program has no sites."


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_subjects_is_shown_as_the_subjects_are(stub_bundle, tmp_path, kind):
    taps = [tapax.capture(lambda x: tapax.sow(x, "h"))(x)[1] for x in (1.0, 2.0)]
    for what in ([kind(taps)], taps):
        page = tapax.view(*what)
        page.save(tmp_path / "taps.html")
        assert [s["name"] for s in page.header["subjects"]] == ["capture a", "capture b"]
    with pytest.raises(TypeError, match="at least one capture"):
        tapax.view(kind())


def test_several_subjects_of_one_kind_are_told_apart(acts):
    taps = [tapax.capture(lambda x: tapax.sow(x, "h"))(x)[1] for x in (1.0, 2.0)]
    header, blob = read(*taps, tapax.Log(), acts)
    names = [subject["name"] for subject in header["subjects"]]
    assert names == ["capture a", "capture b", "run", "acts"]
    found = [numbers_by_name(subject, blob) for subject in header["subjects"][:2]]
    assert [each["h", "value", "rms"].tolist() for each in found] == [[1], [2]]


def test_saved_pages_hold_hostile_names_as_data_alone(tmp_path, stub_bundle):
    _, taps = tapax.capture(lambda x: tapax.sow(x, EVIL))(1.0)
    log = tapax.Log()
    log(0, {f"{EVIL}/value_rms": 1.0})
    make_page(taps, log, ByToken([[1.0]], [EVIL], [EVIL])).save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "onerror" not in text and text.count("<script") == text.count("</script>")
    header, _ = read_saved(text)
    assert [subject["sites"]["name"] for subject in header["subjects"]] == [[EVIL]] * 3


def test_only_python_files_of_the_program_are_read(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    sites = tapax.sites(lambda x: tapax.sow(x, "h"))(1.0)
    stolen = [dataclasses.replace(site, source=f"{secret}:1") for site in sites]
    header, _ = read(type(sites)(stolen))
    assert [file["text"] for file in header["sources"]] == [None]


def test_other_things_are_refused_in_one_sentence():
    with pytest.raises(TypeError, match=r"tapax\.view takes taps, a table of sites or"):
        make_page(3)
    with pytest.raises(TypeError, match="at least one"):
        make_page()
