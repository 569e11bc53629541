def resolve_model_path(name_or_path: str) -> str:
    return name_or_path
