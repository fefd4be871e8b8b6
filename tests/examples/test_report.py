import math

import matplotlib.pyplot as plt
import pytest

import examples.__main__ as everything
from examples._report import OTHER_RUN, Report, options


def test_a_loop_may_be_left_early(tmp_path, capsys):
    report = Report(tmp_path)
    for i in report.track(range(10), "Counting"):
        if i == 3:
            break
    assert i == 3
    assert "Counting (0.0 s)" in capsys.readouterr().out


def test_an_error_in_a_loop_stays_one(tmp_path):
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        for i in Report(tmp_path).track(range(10), "Dividing"):
            1 / (i - 3)


@pytest.fixture
def command(monkeypatch):
    return lambda *args: monkeypatch.setattr("sys.argv", ["example", *args])


def test_options(command):
    command()
    assert vars(options()) == {"seed": 0, "out": "examples/out"}
    command("--seed", "3", "--out", "there")
    assert vars(options()) == {"seed": 3, "out": "there"}
    command("--sed", "x")
    with pytest.raises(SystemExit, match="2"):
        options()


def example(measured):
    """What an example's `main` is."""

    def main(seed=0, out=""):
        report = Report(out)
        report.save(plt.figure(), f"{seed}.png")
        report.expect("a", measured, 0, 1, "other run")
        report.expect("b", math.inf, 0, math.inf, "no bound")
        return report.finish()

    return main


def test_an_example_is_run_as_the_command_line_says(command, tmp_path, capsys):
    command("--seed", "4", "--out", str(tmp_path / "new"))
    Report.run(example(1))
    assert (tmp_path / "new" / "4.png").exists()
    assert " ".join(OTHER_RUN.split()) in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match=r"^Not as expected: a\.$"):
        Report.run(example(2))


def test_what_is_not_as_expected_is_named_with_its_experiment(monkeypatch, tmp_path, capsys):
    mains = {"first": example(1), "second": example(2)}
    monkeypatch.setattr(everything, "EXPERIMENTS", tuple(mains))
    find = lambda name: type("Module", (), {"main": staticmethod(mains[name.split(".")[1]])})
    monkeypatch.setattr(everything.importlib, "import_module", find)
    with pytest.raises(SystemExit, match=r"^Not as expected: second: a\.$"):
        everything.main(5, str(tmp_path))
    assert (tmp_path / "5.png").exists()
    assert capsys.readouterr().out.count("other run") == 2 * 2  # in each table, and in that of all
