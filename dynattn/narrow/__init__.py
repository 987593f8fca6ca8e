"A pretrained model gets its windows: what it still recalls, and what each share costs."
from .recall import Recall, recall_grid

__all__ = ['Recall', 'recall_grid']
