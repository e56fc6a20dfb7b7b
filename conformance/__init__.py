"""What becomes of a layer's value and gradient, in the same programs, through several libraries.

`problem` says what is right: every case has a reference in plain `jnp`, evaluated one operation at
a time. `models_*` write the cases for a framework, unedited, for tapax to capture; `own_*` capture
them with a library's own functions. `run` measures all, and writes `docs/conformance.md`.
"""
