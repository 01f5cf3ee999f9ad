import torch, warnings, shardtensor as st, torch.distributed as dist
def body():
    out=[]
    x = st.distribute(torch.ones(5, 6), "[tp balanced, -]")
    y = st.distribute(torch.ones(5, 6), "[-, tp balanced]")
    z = st.distribute(torch.ones(4, 6), st.ChunkShardingSpec(0,["rank:0","rank:1"]), process_group=dist.new_group([0,1]))
    p = st.init_from_local_tensor(torch.ones(3), "[-] partial(tp)", 3)
    f = st.distribute(torch.ones(7), "flat(tp)")
    def t(fn):
        try: fn()
        except Exception as e: out.append(f"{type(e).__name__}: {e}")
        else: out.append("none")
    with st.strict():
        t(lambda: x+y); t(lambda: torch.linalg.qr(x)); t(lambda: f.view(7,1))
    t(lambda: torch.add(x, st.distribute(torch.ones(5,6),"[tp balanced, -]",process_group=dist.new_group([0,1]))))
    t(lambda: p.add_(1)); t(lambda: torch._foreach_add_([p],1)); t(lambda: x.view(30)[3:].mul_(2) )
    t(lambda: torch.mul(x,2,out=torch.zeros_like(x[:3])))
    t(lambda: x.numpy()); t(lambda: x.data_ptr()); t(lambda: x.unsqueeze_(0)); t(lambda: torch.nn.functional.embedding(torch.tensor([1]),x,sparse=True))
    t(lambda: setattr(x,"data",torch.ones(5,6)));t(lambda: setattr(x,"data",y))
    t(lambda: x.set_(torch.ones(5,6)))
    t(lambda: setattr(x,"_sharding_spec","[-, tp balanced]"))
    return out
def test_it(world):
    for e in world(body,2)[0]: print(e,"\n")
