"""Speed and memory of tapax, as ratios taken in one run.

`python -m benchmarks.run` measures everything on the machine at hand; `python -m benchmarks.gpu`
the first three topics at the size of a GPU.
"""
