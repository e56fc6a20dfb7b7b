"""List the pages of a folder below the index page of the folder, in the navigation."""

ORDER = {
    "frameworks": (
        "nnx linen equinox haiku brainstate keras plain_jax optax orbax diffrax ppo sharding"
    ),
    "coming_from": (
        "nnx linen oryx transformer_lens nnsight pytorch_hooks wandb_watch braintrace probly "
        "jax_tap torchlens"
    ),
    "how_to": "",
    "reference": (
        "tapax reduce alert sink plot attribute hidden online nn data nonfinite viewer monitoring "
        "compat"
    ),
}
ELSEWHERE = {"reference": ("errors", "cli", "changelog")}
"""Pages of a folder that docs/index.md lists by itself."""


def list_pages(app, docname, content):
    """Append a hidden toctree with all pages of the folder: those in `ORDER`, then the others."""
    folder, _, name = docname.rpartition("/")
    if name != "index" or folder not in ORDER or "{toctree}" in content[0]:
        return
    first = ORDER[folder].split()
    left_out = (*first, *ELSEWHERE.get(folder, ()), "index")
    found = sorted(
        found.removeprefix(f"{folder}/")
        for found in app.project.discover()
        if found.startswith(f"{folder}/")
    )
    pages = [*first, *(page for page in found if page not in left_out)]
    content[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def setup(app):
    app.connect("source-read", list_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
