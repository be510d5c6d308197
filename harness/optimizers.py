"""--optimizer: AdamW for all, or Muon for hidden matrices and AdamW for the rest."""
import contextlib
import re

import torch

from common import adamw


# The toy's hidden matrices. Muon is for those, AdamW for embeddings, head, norms, biases, the rest
MATRIX = r"^blocks\..*\b(q|k|v|out|gate|up|down)\.weight$"


class Together:
    """Muon within [WholeMatrices], and AdamW for the rest, as one optimizer.

    names: {parameter of Muon: its name}, of a stack a list with the name of each matrix
    """

    def __init__(self, muon, adamw, wholes, names):
        self.muon = muon
        self.optimizers = [muon, adamw]
        self.wholes = wholes
        self.names = names

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        return {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for whole in self.wholes:
            whole.zero_grad()

    def step(self):
        with contextlib.ExitStack() as stack:
            for whole in self.wholes:
                stack.enter_context(whole)
            self.muon.step()
        self.optimizers[1].step()

    def momenta(self):
        """-> [(name, whole tensor)] of what Muon keeps on this rank of matrices that are cut."""
        found = []
        for p, share in (item for whole in self.wholes for item in whole.shares.items()):
            names = self.names.get(p, ())
            names = [names] if isinstance(names, str) else names
            for name, matrix in zip(names, share.matrices):
                if "momentum_buffer" in self.muon.state.get(matrix, {}):
                    found.append((name, self.muon.state[matrix]["momentum_buffer"]))
        return found


def optimizer_of(args, named, groups=list, wholes=None, names=None):
    """What --optimizer says, for (name, parameter) pairs: AdamW, or Muon for matrices besides.

    groups: groups of parameters -> groups of what AdamW steps in their place
    wholes: parameters -> [WholeMatrices], to be entered in this order; None: no rank cuts them
    """
    named = [(name, p) for name, p in named if p.requires_grad]
    matrices = {}
    if args.optimizer == "muon":
        matrices = {p: name for name, p in named if re.search(MATRIX, name)}
    rest = [p for _, p in named if p not in matrices]
    of_adamw = adamw(groups([{"params": rest}]), args.lr)
    if not matrices:
        return of_adamw
    entered = wholes(list(matrices)) if wholes else []
    of_muon = [{"params": list(matrices)}]
    for whole in entered:
        of_muon = whole.parameter_groups(of_muon)
    # Moonlight's factor, with which AdamW's rate and weight decay are right for Muon, too
    muon = torch.optim.Muon(of_muon, args.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return Together(muon, of_adamw, entered, names or matrices)
