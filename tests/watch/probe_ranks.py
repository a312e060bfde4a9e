from tests.watch.kinds import *
from tests.watch import kinds as K
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
class Before(Replicated):
    def build(self): return llama()
    def prepare(self):
        self.add_watch(self.model); self.inner=self.model; self.model=DDP(self.inner); self.optimizer=self.build_optimizer()
class Recomp(Replicated):
    def build(self):
        m=llama(attention_dropout=0.1); m.gradient_checkpointing_enable({"use_reentrant":False}); return DDP(m.train())
class Static(Replicated):
    def build(self): return DDP(llama(), static_graph=True)
class Unused(Replicated):
    def build(self): return DDP(llama(), find_unused_parameters=True)
class Bucket(Replicated):
    def build(self): return DDP(llama(), gradient_as_bucket_view=True)
class Compiled(Replicated):
    def build(self):
        torch._dynamo.reset(); return torch.compile(DDP(llama()), backend="aot_eager")
class CompiledIn(Replicated):
    def build(self):
        torch._dynamo.reset(); return DDP(torch.compile(llama(), backend="aot_eager"))
class F2(Sharded):
    policies = staticmethod(lambda: {})
class F2Before(F2):
    def build(self): return llama()
    def prepare(self):
        self.add_watch(self.model)
        for l in self.model.model.layers: fully_shard(l)
        fully_shard(self.model); self.optimizer=self.build_optimizer()
class F2Once(F2):
    def step(self, ids, weight):
        for p in range(len(ids)):
            self.model.set_requires_gradient_sync(p==len(ids)-1)
            self.loss(ids[p,None],weight[p,None]).backward()
        self.take_step()
class F2Recomp(F2):
    def build(self):
        m=llama(attention_dropout=0.1); m.gradient_checkpointing_enable({"use_reentrant":False}); m.train()
        for l in m.model.layers: fully_shard(l)
        return fully_shard(m)
class F2Tied(F2):
    def build(self):
        m=llama(tie_word_embeddings=True)
        for l in m.model.layers: fully_shard(l)
        return fully_shard(m)
class F2Head(F2):
    def build(self):
        m=llama()
        for l in m.model.layers: fully_shard(l)
        fully_shard(m.lm_head); fully_shard(m.model.embed_tokens)
        return fully_shard(m)
class F1(Ranked):
    def build(self): 
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer
        return FSDP1(llama(), auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device("cpu"), use_orig_params=self.orig)
    orig=True
    def take_step(self):
        self.norms.append(float(self.model.clip_grad_norm_(1.0))); self.optimizer.step(); self.optimizer.zero_grad()
    def result(self):
        with FSDP1.summon_full_params(self.model): return super().result()
class F1Flat(F1): orig=False
class Mix2(Replicated):
    def build(self):
        from transformers import MixtralConfig, MixtralForCausalLM
        m=MixtralForCausalLM(MixtralConfig(**sizes(num_local_experts=4,num_experts_per_tok=2,output_router_logits=True),router_aux_loss_coef=0.1))
        m.set_output_embeddings(poisoned(m.get_output_embeddings())); return DDP(m)
    def loss(self, ids, weight):
        return self.model(input_ids=ids[:, :T], labels=labelled(ids, weight), num_items_in_batch=ROWS*(T-1)/2).loss
def on(name, **g): return globals()[name](**g).run().result()
