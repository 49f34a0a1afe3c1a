"""Lightning: an optimizer and a schedule in ``configure_optimizers``, a checkpoint after half of the epochs, and its resume.

The resumed training ends with the very weights of one that was not interrupted. Clipping is in the step, so that Lightning
need not touch gradients; its own ``gradient_clip_val`` works as well.
"""

import logging
import tempfile
import warnings

import lightning
import torch
from sklearn.datasets import load_digits

import compiled_optim as co

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pixels.float() / 16, digits), batch_size=128)


class Digits(lightning.LightningModule):
    """A classifier of handwritten digits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        opt = co.AdamW(self.named_parameters(), lr=3e-3, max_grad_norm=1.0)
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def fit(epochs, resume=None):
    """Train a new module up to an epoch; return its trainer and its weights."""
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False)
    trainer = lightning.Trainer(max_epochs=6, accelerator="cpu", callbacks=[], **quiet)
    module = Digits()
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer, module
