"""What a run prints."""

# ---- the report --------------------------------------------------------------


def human(n):
    return f"{n / 1e9:.3f} GB" if n >= 1e9 else f"{n / 1e6:.3f} MB" if n >= 1e4 else f"{n:.6g} B"


def show(report):
    """The closing ledger, of the first rank in the report."""
    mine, check = report["ranks"][0], report["check"]
    print(f"\nrank {mine['rank']}, one step")
    print("  held     ", "   ".join(f"{k} {human(n)}" for k, n in mine["memory"].items()))
    for name, c in mine["collectives"].items():
        print(f"  {name:14} {c['calls']} calls   payload {human(c['payload'])}   sent {human(c['wire'])}")
    for r in report["textbook"]:
        same = "equal" if r["expected"] == r["measured"] else f"measured {human(r['measured'])}"
        print(f"  textbook  {r['what']} = {r['formula']} = {human(r['expected'])}: {same}")
    if report["ms_per_step"]:
        versus = f", {report['speedup']:.2f} times as fast as torch's own" if "speedup" in report else ""
        print(f"  speed     {report['ms_per_step']:.1f} ms/step, {report['tokens_per_second']:,.0f} tok/s{versus}")
    if check:
        gaps = "   ".join(f"{k} {check[k]:.1e}" for k in ("loss", "gradient", "grad_norm", "parameter"))
        print(f"\nagainst the plain GPT in one process, gaps: {gaps}   (tolerance {check['tolerance']:.0e})")
        print("PASSED" if check["passed"] else f"FAILED, worst gradient: {check['gradient_worst']}")
