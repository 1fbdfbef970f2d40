import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_jax.config import search
from megascale_jax.errors import ConfigError

PACKAGE = Path(search.__file__).parents[1]


def copy_package(target: Path) -> None:
    shutil.copytree(PACKAGE, target / "megascale_jax", ignore=shutil.ignore_patterns("__pycache__", "kernels", "data", "train", "views"))


def shipped_tree_of(site: Path, workdir: Path) -> str:
    """What a fresh interpreter that imports the package from ``site`` finds, or its last line of error."""
    code = "import sys; sys.path[0] = sys.argv[1]; from megascale_jax.config.search import shipped_tree as t; print(t())"
    done = subprocess.run([sys.executable, "-c", code, str(site)], cwd=workdir, capture_output=True, text=True, check=False, env={})
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def test_configs_are_found_when_they_lie_beside_or_inside_the_package(tmp_path):
    copy_package(tmp_path)
    assert "install megascale_jax again" in shipped_tree_of(tmp_path, tmp_path)
    (tmp_path / "configs/experiment").mkdir(parents=True)
    assert shipped_tree_of(tmp_path, tmp_path) == str(tmp_path / "configs")
    (tmp_path / "megascale_jax/configs/experiment").mkdir(parents=True)
    assert shipped_tree_of(tmp_path, tmp_path) == str(tmp_path / "megascale_jax/configs")


def test_nearest_lists_everything_when_nothing_is_near():
    assert search.nearest("xyz", ["alpha", "beta"]) == "; known: alpha, beta"
    assert search.nearest("xyz", []) == ""


def test_tree_of_a_file_is_the_parent_of_its_experiment_folder_when_it_has_one(tmp_path):
    assert search.tree_of(tmp_path / "experiment/a.yaml") == tmp_path
    assert search.tree_of(tmp_path / "a.yaml") == tmp_path


def test_find_says_where_it_searched_when_the_name_is_unknown(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.yaml: no model named 'a'; searched .*model"):
        search.find("model", "a", [tmp_path], "x.yaml")
