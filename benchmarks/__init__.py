"""Speed and memory of tapax, as ratios measured in one run.

`python -m benchmarks.run` measures everything on the current machine; `python -m benchmarks.gpu`
measures the first three topics at the size of a GPU.
"""
