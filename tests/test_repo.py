"""House rules: the layout, one thought a line, and what keeps files copyable and true."""
import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize

from conftest import ROOT, parts
from tools.ranks import TECHNIQUES, techniques

RULERS = [f"# ---- {part}. " for part in range(1, 6)]
SOURCES = {}  # {"harness/ledger.py": its text}
for folder in (".", "harness", "tools", "tests"):
    for path in sorted((ROOT / folder).glob("*.py")):
        if folder == "." and path.stem not in [*TECHNIQUES, "common"]:
            continue  # a reader's program
        SOURCES[path.relative_to(ROOT).as_posix()] = path.read_text()
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}


def test_the_root_shows_the_techniques_each_with_a_test(tmp_path):
    shutil.copy(ROOT / "ddp.py", tmp_path)
    (tmp_path / "train.py").write_text("from ddp import BucketedDDP\n")  # README's, of a reader
    assert techniques(tmp_path) == ["ddp"]
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    root = {name for name in listed.stdout.splitlines() if "/" not in name}
    assert root == {f"{name}.py" for name in [*TECHNIQUES, "common"]}  # of ours nothing else
    for name in TECHNIQUES:
        assert f"tests/test_{name}.py" in SOURCES, name


OURS = {*TECHNIQUES, "common", "harness", "tools", "conftest"}
FLOORS = {  # what may be imported of ours, downwards only
    "common.py": set(),
    "harness": {"common", "harness"},
    "techniques": {"common", "harness"},
    "hybrid_3d.py": {"common", "harness", *TECHNIQUES} - {"hybrid_3d"},
    "tools": OURS - {"conftest"},
}


def imported(tree):
    """The packages that it imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def test_arrows_point_downwards():
    for name, tree in TREES.items():
        if not name.startswith("tests/"):
            folder = name.split("/")[0]
            allowed = FLOORS.get(folder, FLOORS["techniques"])
            above = imported(tree) & OURS - allowed
            assert not above, f"{name} imports {above}"


# what only a technique means: its modules, its parameters, its flags and axes
NAMES_OF_THE_GPT = r"\b(tok|pos|head)\.weight\b"
OF_TECHNIQUES = (
    r"\b(tp|pp|cp|ep|dp)\b", r"\.experts\b", NAMES_OF_THE_GPT, r"\btop_k\b",
    r"\bcapacity\b", r"\bbalance\b", r"\brouter\b", r"\bamp\b",
)


def test_common_and_harness_know_no_technique():
    for name in SOURCES:
        if name != "common.py" and not name.startswith("harness/"):
            continue
        patterns = set(OF_TECHNIQUES)
        if name == "common.py":
            patterns.remove(NAMES_OF_THE_GPT)  # which is its own
        skip = docstring_lines(TREES[name])
        for number, line in enumerate(SOURCES[name].splitlines(), 1):
            code = re.sub(r"(^|  )\s*# .*", "", line)
            for pattern in patterns:
                spoken = number not in skip and re.search(pattern, code)
                assert not spoken, f"{name}:{number} speaks of {pattern}"


def test_width_and_characters():
    for name in SOURCES:
        for number, line in enumerate(SOURCES[name].splitlines(), 1):
            assert len(line) <= 100, f"{name}:{number}"
        assert SOURCES[name].isascii(), name


def test_short_functions_and_no_packing():
    for name in SOURCES:
        for node in ast.walk(TREES[name]):
            where = f"{name}:{getattr(node, 'lineno', '')}"
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 40, f"{where}: over 40 lines"
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                target = node.targets[0]
                if isinstance(target, ast.Tuple):
                    left, right = [sorted(map(ast.unparse, side.elts))
                                   for side in (target, node.value)]
                    assert left == right, f"{where}: a tuple assigned to a tuple, no swap"
            if isinstance(node, ast.For):
                assert not isinstance(node.iter, ast.IfExp), f"{where}: for over a conditional"
            if isinstance(node, ast.Expr):
                assert not isinstance(node.value, ast.IfExp), f"{where}: conditional statement"


def docstring_lines(tree):
    lines = set()
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def test_density():
    """Tokens per line of code."""
    kinds = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    for name, source in SOURCES.items():
        skip = docstring_lines(TREES[name])
        lines = []
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in kinds and token.start[0] not in skip:
                lines.append(token.start[0])
        assert len(lines) <= 12 * len(set(lines)), name


def test_parts():
    """Docstring, then five ruled parts, with the names that all files share. Parts 1 and 2 import
    torch alone, but for hybrid_3d's.
    """
    for name in TECHNIQUES:
        source = SOURCES[f"{name}.py"]
        tree = TREES[f"{name}.py"]
        docstring = ast.get_docstring(tree)
        assert len(docstring.splitlines()) <= 40, name
        assert "Not for:" in docstring, name
        places = [source.index("\n" + ruler) for ruler in RULERS]
        assert places == sorted(places), name
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {"parallelize", "train_step", "main"} <= functions, name
        if name != "hybrid_3d":
            copied = parts(name, 2)
            assert imported(ast.parse(copied)) <= {"torch", *sys.stdlib_module_names}, name
            assert "environ" not in copied, name


def test_part_2_says_what_it_takes_of_part_1():
    for name in TECHNIQUES:
        start, middle, end = [SOURCES[f"{name}.py"].index("\n" + ruler) for ruler in RULERS[:3]]
        defined = {}  # in part 1
        for node in ast.parse(SOURCES[f"{name}.py"][start:middle]).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined[node.name] = node
            if isinstance(node, ast.Assign):
                defined[ast.unparse(node.targets[0])] = node
        second = SOURCES[f"{name}.py"][middle:end]
        taken = set()
        to_read = [ast.parse(second)]
        while to_read:
            names = {node.id for node in ast.walk(to_read.pop()) if isinstance(node, ast.Name)}
            to_read += [defined[each] for each in names & defined.keys() - taken]
            taken |= names & defined.keys()
        heading = " ".join(second.splitlines()[1:4])
        assert taken <= set(re.findall(r"\w+", heading)), name


def test_no_machine_paths_and_no_skips():
    paths = r"(^|[^\w.])/(wo[r]k|ro[o]t|ho[m]e)/"
    skips = r"pytest\.(ski[p]|xfai[l])|mark\.(ski[p]|xfai[l])"
    leftovers = r"TO[D]O|FIX[M]E"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if name.endswith((".py", ".md", ".sh", ".toml", ".txt")) and (ROOT / name).exists():
            text = (ROOT / name).read_text()
            for unwanted in (paths, skips, leftovers):
                assert not re.search(unwanted, text), f"{name}: {unwanted}"
