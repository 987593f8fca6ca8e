"`python -m dynattn`: the command `dynattn`, also under `accelerate launch -m dynattn`."
import sys
from dynattn.command import main

if __name__=='__main__': sys.exit(main())
