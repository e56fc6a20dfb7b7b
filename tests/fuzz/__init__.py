"""Random programs, an oracle that shares no code with the engine, and their comparison.

    program.py    the language: frozen nodes, each from a vector to a vector
    generate.py   programs(), edited(), selected(), losses(): the hypothesis strategies
    build.py      build(program, sow): the program in JAX; by_hand(program, mark): with changes
    sites.py      sites(program): names, order and axes of the marks, from the text of the program
    tape.py       reverse-mode differentiation in numpy
    reference.py  run(program): the program in Python loops, every execution of every mark recorded
    compare.py    check(program): capture, compare, or Mismatch
    edits.py      check_edits(program): edits, against the same changes made in the source
    perturb.py    check_perturbed(program): perturbations and their gradients, likewise
    cuts.py       check_cuts(program): a function before and after a site
    reductions.py check_reductions(program): statistics, against those of the reference's records
    parts.py      parts of values, and functions of them
    readings.py   readings(program, of): the sites that the selections pick, as sets of names
    selections.py check_selections(program): selections, parts and functions, likewise
    nonfinite.py  check_nonfinite(program): the search for a NaN planted at one execution of a mark
    shrink.py     shrink(program, fails): a smaller program that fails
    drive.py      sweep(check, strategy): many programs, or Failure

`python -m tests.fuzz --minutes 10` runs for ten minutes and prints the smallest program that fails.
"""
