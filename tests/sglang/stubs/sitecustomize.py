"""Lets torchvision load next to a build of torch for which its compiled operators are not made, a CPU's: on import it
asks for the schemas of two of them. This folder is on the PYTHONPATH of the server that is tested."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path


class BeforeTorchvision:
    """A finder of modules that finds none, and defines the two operators when torchvision is first looked for."""

    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision" and cls.library is None:
            import torch

            found = PathFinder.find_spec(name)
            try:
                for compiled in Path(found.submodule_search_locations[0]).glob("_C*.so"):
                    torch.ops.load_library(compiled)
            except OSError:
                cls.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    cls.library.define(f"{operator}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, BeforeTorchvision)
