import pytest

from examples._report import Report


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
