import time, torch, sys
from parallel import *
from parallel.mesh import CubeMesh
from parallel.cube import CubeLayer, layer_cuts
from parallel.rows import RowLayout
from ranks import run_ranks
def check(rank, shape, B, S, causal=True, block=6, dropout=0.0, ring=False, dtype=torch.float64):
    mesh = CubeMesh(*shape)
    torch.manual_seed(0)
    size = LayerSize(width=24, heads=4, feed_forward=48, dropout=dropout)
    layer = TransformerLayer(size, kind="blockwise", recompute=False).to(dtype)
    for n,p in layer.named_parameters():
        torch.nn.init.normal_(p, std=.3)
    x = torch.randn(B,S,24,dtype=dtype, requires_grad=True)
    g = torch.randn(B,S,24,dtype=dtype)
    torch.manual_seed(5)
    y = layer(x, Scope(causal=causal)); y.backward(g)
    cube = CubeLayer(layer, mesh, ring=ring)
    lay = RowLayout.of(mesh, batch=B, length=S, block=block)
    pos = lay.positions("y")
    def local(t):
        t = torch.nn.functional.pad(t.detach(), (0,0,0,lay.padded-S))[lay.sequences]
        return t[:, pos].transpose(0,1).chunk(mesh.sizes["z"],2)[mesh.place["z"]].contiguous()
    xl = local(x).requires_grad_()
    torch.manual_seed(5)
    yl = cube(xl, lay, Scope(causal=causal)); yl.backward(local(g))
    real = (pos < S)[:,None,None]
    err = [((yl-local(y))*real).abs().max().item(), ((xl.grad-local(x.grad))*real).abs().max().item()]
    for n, cut in layer_cuts().items():
        err.append((cut.part(layer.get_parameter(n).grad, mesh)-cube.get_parameter(n).grad).abs().max().item())
    total = sum(p.numel() for p in layer.parameters()); own = sum(p.numel() for p in cube.parameters())
    assert own * mesh.sizes["cube"] == total
    return max(err), lay.padded
if __name__ == "__main__":
    for s in [(1,1,1),(2,1,1),(1,2,1),(1,1,2),(2,2,1),(2,1,2),(1,2,2),(2,2,2),(3,2,1),(4,2,1),(1,4,2)]:
        for B,S,ring,dr in [(1,24,False,0),(1,29,True,.3),(2,17,False,.3),(3,48,True,0)]:
            t=time.time(); out = run_ranks(s[0]*s[1]*s[2], check, s, B, S, True, 6, dr, ring); print(s, B,S,ring,dr, max(o[0] for o in out), out[0][1], round(time.time()-t,2), flush=True)
        if 24 % (2*s[0]*s[1]*s[2])==0: print("non-causal", max(run_ranks(s[0]*s[1]*s[2], check, s, 1, 24*s[0], False))) 
