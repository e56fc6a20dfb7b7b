"""Random programs, an oracle that shares no code with the engine, and their comparison.

    program.py    the language: frozen nodes, each from a vector to a vector
    generate.py   programs(): the hypothesis strategy
    build.py      build(program, sow): the program in JAX
    sites.py      sites(program): names, order and axes of its marks, from its text
    tape.py       reverse-mode differentiation in numpy
    reference.py  run(program): the program in Python loops, every execution of every mark recorded
    compare.py    check(program): capture, compare, or Mismatch
    shrink.py     shrink(program, fails): a smaller program that fails
    drive.py      sweep(check, strategy): many programs, or Failure

`python -m tests.fuzz --minutes 10` runs for ten minutes and prints the smallest program that fails.
"""
