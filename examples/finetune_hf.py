"""Fine-tune a Hugging Face classifier whose heads learn how far they look.

    python examples/finetune_hf.py train.tsv --model bert-base-uncased --out runs/near

Each line of train.tsv is `label<TAB>text`. `--model tiny` is a small random BERT over bytes, to try the script without a network.
"""
import argparse, random

def options(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('train', help='lines of label<TAB>text')
    p.add_argument('--model', default='tiny', help="a name or folder that from_pretrained knows, or 'tiny' [tiny]")
    p.add_argument('--out', default='runs/finetuned', help='folder for the model [runs/finetuned]')
    p.add_argument('--price', type=float, default=.01, help='of the mean width as a share of the text [0.01]')
    p.add_argument('--alpha', action='store_true', help='also learn an alpha for each head')
    p.add_argument('--init', type=float, default=64., help='half-width at the start, in tokens [64]')
    p.add_argument('--epochs', type=float, default=3., help='[3]')
    p.add_argument('--batch', type=int, default=16, help='texts per step [16]')
    p.add_argument('--lr', type=float, help='rate of the weights [5e-5; 3e-3 for tiny, which is not pretrained]')
    p.add_argument('--lr-widths', type=float, default=.05, help='rate of the widths [0.05]')
    p.add_argument('--max-length', type=int, default=128, help='tokens of a text at most [128]')
    p.add_argument('--seed', type=int, default=0, help='[0]')
    return p.parse_args(argv)

if __name__=='__main__': OPTIONS = options()  # before the imports, so that --help needs none of them
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments
from dynattn import hf
from dynattn.texts import text_lines

class Bytes:
    "The tokenizer of `--model tiny`: [CLS], then the bytes of the text."
    def __call__(self, text, max_length=128, **_):
        ids = [1] + [b+2 for b in text.encode()[:max_length-1]]
        return dict(input_ids=ids, attention_mask=[1]*len(ids))

def collate(rows):
    n = max(len(r['input_ids']) for r in rows)
    pad = lambda key: torch.tensor([r[key] + [0]*(n-len(r[key])) for r in rows])
    return dict(input_ids=pad('input_ids'), attention_mask=pad('attention_mask'), labels=torch.tensor([r['labels'] for r in rows]))

def build(name, labels, max_length):
    names = dict(num_labels=len(labels), id2label=dict(enumerate(labels)), label2id={l: i for i,l in enumerate(labels)})
    if name!='tiny': return AutoTokenizer.from_pretrained(name), AutoModelForSequenceClassification.from_pretrained(name, **names)
    config = BertConfig(vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=max_length, **names)
    return Bytes(), BertForSequenceClassification(config)

def read(path, tokenizer, labels, max_length):
    for line in text_lines(path):
        label,text = line.rstrip('\n').split('\t', 1)
        yield dict(tokenizer(text, truncation=True, max_length=max_length), labels=labels.index(label))

def accuracy(result): return dict(accuracy=float((result.predictions.argmax(-1)==result.label_ids).mean()))

def optimizer(model, lr, lr_widths):
    "Widths move on a scale of their own, and are not decayed."
    mine = [p for name,p in model.named_parameters() if '.dynattn.' in name]
    rest = [p for name,p in model.named_parameters() if '.dynattn.' not in name]
    return torch.optim.AdamW([dict(params=rest, lr=lr), dict(params=mine, lr=lr_widths, weight_decay=0.)])

def main(a):
    torch.manual_seed(a.seed)
    lr = a.lr or (3e-3 if a.model=='tiny' else 5e-5)
    labels = sorted({line.split('\t', 1)[0] for line in text_lines(a.train)})
    tokenizer,model = build(a.model, labels, a.max_length)
    hf.add_windows(model, init=a.init, penalty=a.price)
    if a.alpha: hf.add_alpha(model, init=1.1)
    rows = list(read(a.train, tokenizer, labels, a.max_length))
    random.Random(a.seed).shuffle(rows)
    held = rows[:max(len(rows)//10, 1)]
    make = collate if a.model=='tiny' else DataCollatorWithPadding(tokenizer)
    args = TrainingArguments(a.out, num_train_epochs=a.epochs, per_device_train_batch_size=a.batch, per_device_eval_batch_size=a.batch, seed=a.seed,
                             save_strategy='no', report_to='none', remove_unused_columns=False, logging_steps=10)
    trainer = Trainer(model, args, train_dataset=rows[len(held):], eval_dataset=held, data_collator=make, compute_metrics=accuracy,
                      optimizers=(optimizer(model, lr, a.lr_widths), None))
    before = hf.report(model, trainer._prepare_inputs(make(held[:a.batch])))
    trainer.train()
    score,after = trainer.evaluate(),hf.report(model.eval(), trainer._prepare_inputs(make(held[:a.batch])))
    hf.save(model, a.out)
    if a.model!='tiny': tokenizer.save_pretrained(a.out)
    print(f"accuracy {score['eval_accuracy']:.1%} on {len(held)} held-out texts; share of the score matrix {before.share.mean():.1%} before, {after.share.mean():.1%} after\n{after}")

if __name__=='__main__': main(OPTIONS)
