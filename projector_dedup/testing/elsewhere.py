"""Call a function in a process of its own, in which ``hash()`` has another seed, as in a second worker."""

from __future__ import annotations

import io
import marshal
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

_PROGRAM = """
import pickle, sys
answer, sys.stdout = sys.stdout.buffer, sys.stderr  # a module that is imported may print
sys.path[:] = pickle.load(sys.stdin.buffer)
answer.write(pickle.dumps(pickle.load(sys.stdin.buffer)()))
"""


def called_elsewhere(function: Callable[[], Any]) -> Any:
    """Return ``function()``, called in a new process, which imports what the function names.

    Raises an error of pickle for an object that cannot be sent, and ``RuntimeError`` with the error of the process.
    """
    sent = io.BytesIO()
    sender = _Sender(sent)
    sender.dump(function)
    path = pickle.dumps([*sys.path, *sender.folders])
    seed = {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    command, env = [sys.executable, "-c", _PROGRAM], {**os.environ, **seed}
    done = subprocess.run(command, input=path + sent.getvalue(), capture_output=True, env=env, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return pickle.loads(done.stdout)  # noqa: S301  # from the program above


class _Sender(pickle.Pickler):
    """Sends a lambda, or a function in a function, as its code: no process can import it by its name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        #: where the modules can be imported, because pytest may have loaded them by their files
        self.folders: set[str] = set()

    def reducer_override(self, given: Any) -> Any:
        name = str(getattr(given, "__module__", ""))
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None:
            above = name.count(".") + (Path(file).name == "__init__.py")
            self.folders.update(map(str, [*Path(file).parents][above : above + 1]))
        if not isinstance(given, FunctionType) or "<" not in given.__qualname__:
            return NotImplemented
        cells = [each.cell_contents for each in given.__closure__ or ()]
        return _received, (
            marshal.dumps(given.__code__),
            given.__module__,
            given.__defaults__,
            given.__kwdefaults__,
            cells,
        )


def _received(code: bytes, module: str, defaults: Any, keywords: Any, cells: list[Any]) -> FunctionType:
    loaded = marshal.loads(code)  # noqa: S302  # from the class above
    function = FunctionType(loaded, vars(import_module(module)), None, defaults, tuple(map(CellType, cells)))
    function.__kwdefaults__ = keywords
    return function
