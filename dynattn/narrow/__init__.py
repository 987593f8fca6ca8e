"A pretrained model learns how far its heads look: what it still recalls, and what each share costs."
from .recall import Recall, forgotten, recall_grid

__all__ = ['Recall', 'forgotten', 'recall_grid']
