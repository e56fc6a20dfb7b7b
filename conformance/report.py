import json
def dump(data): return json.dumps(data)
def render(page, data): return page
def table(results):
    from rich.table import Table
    t=Table("case",*results)
    for case in next(iter(results.values()))["verdicts"]:
        t.add_row(case,*(" / ".join(v[0] for v in r["verdicts"][case]) for r in results.values()))
    return t
def reasons(found):
    return "\n".join(f"{c} {v}" for c,vs in found["verdicts"].items() for v in vs if len(v)>1)
