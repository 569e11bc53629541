from dataclasses import dataclass
from pathlib import Path

import yaml

from finetune.recipe import Recipe


@dataclass(frozen=True)
class LoadedRecipe:
    recipe: Recipe
    origins: dict
    path: Path


def load_recipe(path, overrides=()):
    d = yaml.safe_load(Path(path).read_text())
    for o in overrides:
        k, v = o.split("=", 1)
        t = d
        *ks, l = k.split(".")
        for x in ks:
            t = t.setdefault(x, {})
        t[l] = yaml.safe_load(v)
    d.setdefault("output_dir", "runs/" + Path(path).stem)
    return LoadedRecipe(Recipe.model_validate(d), {}, Path(path))


def resolved_yaml(l):
    return yaml.safe_dump(l.recipe.model_dump(mode="json"))


def recipe_from_resolved(p):
    return Recipe.model_validate(yaml.safe_load(Path(p).read_text()))
