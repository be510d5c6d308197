"""What a run tells: a table while it trains, and at the end what was proved, counted and timed."""

SHOWN = 6  # tensors that differ

# ---- while it trains ---------------------------------------------------------


def human(n):
    """Bytes for people: MB = 1e6."""
    if n >= 1e9:
        return f"{n / 1e9:.3f} GB"
    if n >= 1e4:
        return f"{n / 1e6:.3f} MB"
    return f"{n:.6g} B"


def head(validates):
    """validates: is there a column for the loss on held-out text?"""
    more = " held out" if validates else ""
    return f"{'step':>6} {'loss':>9} {'norm':>9} {'rate':>9} {'tok/s':>9}{more}"


def row(step, loss, norm, rate, tokens_per_second, validation=None):
    more = "" if validation is None else f"{validation:9.4f}"
    return f"{step:6d} {loss:9.4f} {norm:9.4f} {rate:9.2e} {tokens_per_second:9,.0f}{more}"


# ---- the report --------------------------------------------------------------


def show(report):
    """The closing report. Of bytes it shows those of the first rank it lists."""
    check = report["check"]
    if check:
        print("\n" + verdict(check))
        for impl, other in check.get("others", {}).items():
            print(f"  {impl}: {gaps_of(other)}")
    mine = report["ranks"][0]
    print(f"\nrank {mine['rank']}, one step")
    held = [f"{kind} {human(size)}" for kind, size in mine["memory"].items()]
    print("  held     ", "   ".join(held))
    for name, c in mine["collectives"].items():
        moved = f"payload {human(c['payload'])}   sent {human(c['wire'])}"
        print(f"  {name:14} {c['calls']} calls   {moved}")
    for row in report["textbook"]:
        in_words = "{:g}".format if row["what"].startswith("calls") else human
        line = f"{row['what']} = {row['formula']} = {in_words(row['expected'])}: "
        equal = row["expected"] == row["measured"]
        line += "equal" if equal else f"measured {in_words(row['measured'])}"
        print("  textbook ", line)
    if report["ms_per_step"]:
        line = f"{report['ms_per_step']:.1f} ms/step, {report['tokens_per_second']:,.0f} tok/s"
        if "speedup" in report:
            line += f", {report['speedup']:.2f} times as fast as torch's own"
        print("  speed    ", line)
        flops = report["flops"]
        line = f"{flops['per_second'] / 1e12:.3g} TFLOP/s"
        if "utilization" in flops:
            line += f", {flops['utilization']:.1%} of what the GPUs could do in bf16 (MFU)"
        print("  compute  ", line)
    if check and check["passed"]:
        print("PASSED")
        print("to try next: " + NEXT)
    elif check:
        for line in check["differ"][:SHOWN]:
            print("  " + line)
        print(f"FAILED, worst gradient: {check['gradient_worst']}")


NEXT = ("--impl all times the idea and torch's; --dtype fp64 proves; "
        "python FILE.py --dry-run 512 counts")

WORDS = {
    "gradient": "gradients",
    "loss": "losses",
    "grad_norm": "gradient norms",
    "parameter": "parameters",
    "validation": "held-out losses",
}


def verdict(check):
    """What was proved, in a sentence."""
    relation = "equal"
    if not check["passed"]:
        relation = "should equal"
    proved = (f"{check['gradients_compared']} tensors' gradients {relation} one process's, "
              "and all else that training does")
    if "gradient" not in check["judged"]:
        what = "losses"
        if "validation" in check["judged"]:
            what = "losses, also on held-out text,"
        proved = f"{what} {relation} one process's, and nothing else is judged here"
    return f"{proved}; worst gaps:\n  {gaps_of(check)} (tolerance {check['tolerance']:.0e})"


def gaps_of(check):
    return ", ".join(f"{word} {check[kind]:.1e}" for kind, word in WORDS.items() if kind in check)
