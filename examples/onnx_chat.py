"""Talk with an exported model, without PyTorch:

    dynattn export runs/narrow --out runs/onnx --int4
    python examples/onnx_chat.py runs/onnx

It runs beside the `onnx_model.py` of the folder and needs onnxruntime, numpy, tokenizers and jinja2. An empty line ends
the conversation. `--once TEXT` answers one message."""
import argparse, sys

def answer(model, messages, read, options):
    "Write the answer to the last of `messages`; what was read before is not read again."
    text = model.chat_text(messages)
    if not text.startswith(read):                 # the template changed what it wrote before
        model.reset()
        read = ''
    said = ''
    for piece in model.write(text[len(read):], **options):
        print(piece, end='', flush=True)
        said += piece
    print()
    messages.append(dict(role='assistant', content=said))
    return text+said

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('folder', help='written by dynattn export')
    p.add_argument('--once', metavar='TEXT', help='answer this and stop')
    p.add_argument('--max-new-tokens', type=int, default=200)
    p.add_argument('--temperature', type=float, default=0., help='0: the most likely token each time')
    p.add_argument('--top-p', type=float, default=.9)
    p.add_argument('--seed', type=int)
    p.add_argument('--threads', type=int)
    a = p.parse_args()
    sys.path.insert(0, a.folder)
    from onnx_model import OnnxModel
    model,messages,read = OnnxModel(a.folder, a.threads),[],''
    options = dict(max_new_tokens=a.max_new_tokens, temperature=a.temperature, top_p=a.top_p, seed=a.seed)
    while line := a.once or input('> ').strip():
        messages.append(dict(role='user', content=line))
        read = answer(model, messages, read, options)
        print(f"[{model.past} tokens read, {model.caches.nbytes/2**20:.1f} MiB of keys and values]", file=sys.stderr)
        if a.once: break

if __name__=='__main__': main()
