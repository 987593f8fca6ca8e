"""Windows along patches and along time: a small vision transformer learns digits and how far its heads look.

    python examples/vision_windows.py                # fifteen seconds on one core, no download
    python examples/vision_windows.py --epochs 20

The digits are scikit-learn's, 8 by 8 pixels in 16 patches. A price on the mean width makes the heads near-sighted where that
costs nothing. Then the encoders of CLIP, Whisper and wav2vec2, with random weights, take one step each with windows.
"""
import argparse

def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--epochs', type=int, default=12, help='of the digits [12]')
    return p.parse_args()

if __name__=='__main__': OPTIONS = options()  # before the imports, so that --help needs none of them
import torch
from torch.nn import functional as F
from transformers import CLIPVisionConfig, CLIPVisionModel, ViTConfig, ViTForImageClassification
from transformers import Wav2Vec2Config, Wav2Vec2Model, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from dynattn import hf

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)

def digits():
    "Images [1797,1,8,8] from -1 to 1 and labels, in a fixed random order; the last 360 are for testing."
    from sklearn.datasets import load_digits
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order,None]/8-1
    labels = torch.tensor(data.target)[order]
    return images[:-360], labels[:-360], images[-360:], labels[-360:]

def vit():
    config = ViTConfig(**SIZES, image_size=8, patch_size=2, num_channels=1, num_labels=10)
    return hf.add_windows(ViTForImageClassification(config), init=16., penalty=.3)

def train(model, images, labels, epochs, lr=3e-3):
    "Adam; the widths take larger steps than the weights."
    widths = [p for name,p in model.named_parameters() if 'dynattn' in name]
    weights = [p for name,p in model.named_parameters() if 'dynattn' not in name]
    opt = torch.optim.Adam([dict(params=weights), dict(params=widths, lr=20*lr)], lr=lr)
    model.train()
    for epoch in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = model(images[batch], labels=labels[batch]).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch+1}: loss {loss.item():.3f}, mean width {hf.mean_width(model).item():.0%} of the image")

@torch.no_grad()
def accuracy(model, images, labels): return (model.eval()(images).logits.argmax(-1)==labels).float().mean().item()

def others():
    "Encoders for images and speech, and an input for each: 17 patches, 50 and 49 steps of time."
    whisper = dict(d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, num_mel_bins=16)
    speech = dict(num_conv_pos_embedding_groups=4, conv_dim=[16]*7)
    yield CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=8, patch_size=2)), torch.randn(2, 3, 8, 8)
    yield WhisperEncoder(WhisperConfig(**whisper, max_source_positions=50)), torch.randn(2, 16, 100)
    yield Wav2Vec2Model(Wav2Vec2Config(**SIZES, **speech, mask_time_prob=0.)), torch.randn(2, 16000)

def one_step(model, x):
    "Whether windows of four steps change the output, and what share of the width parameters has a gradient."
    model.eval()
    before = model(x)[0]
    hf.add_windows(model, init=4., n_global=0)
    out = model(x)[0]
    out.square().mean().backward()
    widths = [p.grad for name,p in model.named_parameters() if 'dynattn' in name]
    return F.mse_loss(out, before).sqrt().item(), sum(bool(g.abs().min()>0) for g in widths)/len(widths)

def main(a):
    torch.manual_seed(0)
    images,labels,test_images,test_labels = digits()
    model = vit()
    train(model, images, labels, a.epochs)
    print(f"accuracy {accuracy(model, test_images, test_labels):.1%} on 360 digits never seen")
    print(hf.report(model, dict(pixel_values=test_images)))
    for other,x in others():
        moved,learning = one_step(other, x)
        print(f"{type(other).__name__}: windows move the output by {moved:.2g}, {learning:.0%} of the widths learn")

if __name__=='__main__': main(OPTIONS)
