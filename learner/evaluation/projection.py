"""Queries on a plane, for maps."""

from importlib import import_module

import torch
from jaxtyping import Float
from torch import Tensor


def project_2d(points: Float[Tensor, "points dim"]) -> Float[Tensor, "points 2"]:
    """t-SNE where scikit-learn is installed (MLflow brings it) and there are enough points, else PCA."""
    centred = points - points.mean(dim=0)
    try:
        manifold = import_module("sklearn.manifold")
    except ImportError:
        manifold = None
    if manifold is None or len(points) < 10:
        return centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    perplexity = min(30.0, (len(points) - 1) / 3)
    tsne = manifold.TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=0, n_jobs=1)
    return torch.from_numpy(tsne.fit_transform(centred.numpy())).float()
