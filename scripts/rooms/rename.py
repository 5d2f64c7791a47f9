"""Renames identifiers. 'scoped': a name defined in a module, renamed there and in files that import it. 'global': every whole word
in python code files under the given globs. Python tokens only (NAME tokens), and in strings/comments/docstrings when in backticks or for class names."""
import ast,re,subprocess,pathlib,tokenize,io
def git(*a): return subprocess.check_output(['git',*a],text=True)
SCOPED='''
memplan.solvers.arrays.problem_arrays Core ProblemArrays
memplan.schedule.arrays.graph_arrays Core GraphArrays
memplan.runtime.guards.input_guards Signature InputGuards
memplan.runtime.guards.layout_guards Alike LayoutGuards
memplan.runtime.guards.module_state_guards Slots ModuleStateGuards
memplan.runtime.guards.python_value_guards Constants PythonValueGuards
memplan.runtime.memory.arena_ownership Ledger ArenaOwnership
memplan.runtime.memory.shared_arena NotedLedger ObservedOwnership
memplan.runtime.memory.shared_arena Conductor ArenaCoordinator
memplan.runtime.memory.shared_arena Lane GraphInstance
memplan.runtime.memory.shared_arena Role ArenaSlot
memplan.runtime.memory.shared_arena Event InstanceEvent
memplan.runtime.dynamo.backend Section GraphModuleWithParams
memplan.runtime.dynamo.backend Lane GraphInstance
memplan.runtime.dynamo.backend Conductors ArenaCoordinators
memplan.runtime.memory.stream_ordering StreamTurns StreamOrdering
memplan.runtime.on_demand.on_demand_offload Passive OnDemandOffload
memplan.runtime.on_demand.live_bytes Living LiveBytes
memplan.runtime.on_demand.saved_tensors Saved SavedTensor
memplan.runtime.on_demand.saved_tensors Block SavedBlock
memplan.runtime.profile.op_timer Meter OpTimer
memplan.runtime.profile.profile_guided Guide ProfileGuide
memplan.runtime.profile.profile_guided Measured MeasuredStep
memplan.runtime.execute.arena_gradients ResidentGradients ArenaGradients
memplan.runtime.execute.cuda_graphs GraphedProgram CudaGraphProgram
memplan.runtime.debug.sanitizers Guards Sanitizers
memplan.runtime.debug.hooks Block ArenaBlock
memplan.runtime.kernels.kernel_selection Form CallForm
memplan.runtime.kernels.kernel_selection Binder KernelSelector
memplan.trace.traced Kernel KernelCall
memplan.trace.traced Handed OpaqueResult
memplan.schedule.arrays.compiled Kernel CompiledKernel
memplan.core.evictions Section DeviceArena
memplan.solvers.search.search_variant Form SearchVariant
memplan.solvers.search.capacity_search Race CapacitySearch
memplan.solvers.limits Limits SolverLimits
memplan.planning.planfile Form FileFormat
memplan.evict.simulator.device_state Device DeviceState
memplan.evict.simulator.device_state Where Location
memplan.evict.simulator.device_state Way EvictionKind
memplan.evict.simulator.eviction_simulator Walk EvictionSimulator
memplan.evict.simulator.memory Memory SimulatedMemory
memplan.evict.simulator.memory Counter ByteCounter
memplan.evict.simulator.memory Addresses AddressSpace
memplan.evict.judge.arrays Arrays WorkloadArrays
memplan.evict.judge.arrays Measured MeasuredEvents
memplan.evict.search.decisions Search DecisionSearch
memplan.evict.search.descent Walked Descended
memplan.analysis.forecast Place StoragePlace
memplan.analysis.forecast Where Residence
memplan.analysis.explain Held HeldBuffer
memplan.analysis.explain Role BufferRole
memplan.runtime.debug.tracker Held HeldBytes
memplan.trace.torch_budget Partition TorchPartition
memplan.trace.torch_budget Point TorchPoint
memplan.planning.frontier Point FrontierPoint
memplan.trace.capture.python_values Link Access
memplan.recording.tape Event TapeEvent
memplan.recording.places Place PlannedPlace
memplan.runtime.kernels.pool_placement Placer PoolPlacer_
memplan.symbolic.place Placer SymbolicPlacer
memplan.schedule.search.ideals Outcome SearchOutcome
memplan.solvers.arrays.instance Outcome PieceOutcome
memplan.report.picture Block PictureBlock
memplan.report.picture Copy PictureCopy
memplan.check.check Limits CheckLimits
memplan.trace.graph.alias_classes Tables AliasClasses
memplan.trace.dynamic.symbolic_capture SymbolicTables SymbolicAliasClasses
memplan.trace.chunking.chunk_rewrite Divider ChunkRewriter
'''
GLOBAL='''
memplan/**,tests/**,benchmarks/** chances inplace_candidates
memplan/**,tests/**,benchmarks/** with_chances with_inplace_candidates
memplan/**,tests/**,benchmarks/** _chances _inplace_candidates
memplan/**,tests/**,benchmarks/** hands opaque_results
memplan/**,tests/**,benchmarks/** ledger ownership
memplan/**,tests/**,benchmarks/** _ledger _ownership
'''
files=[f for f in git('ls-files','*.py').split()]
def mod(f): return f[:-3].replace('/','.').removesuffix('.__init__')
src={f:pathlib.Path(f).read_text() for f in files}
trees={f:ast.parse(s) for f,s in src.items()}
path={mod(f):f for f in files}
# re-exports: package.name -> origin module
def imports(f):
    for n in ast.walk(trees[f]):
        if isinstance(n,ast.ImportFrom) and n.module:
            for a in n.names: yield n.module,a.name,a.asname
def names_tokens(s,old,new,docs):
    out=[]; 
    toks=list(tokenize.generate_tokens(io.StringIO(s).readline))
    lines=s.splitlines(keepends=True)
    edits=[]
    fdepth=0
    for i,t in enumerate(toks):
        if t.type==tokenize.NAME and t.string==old: edits.append((t.start,t.end,new))
        elif t.type==tokenize.STRING and t.string=='"'+old+'"' and docs=='init': edits.append((t.start,t.end,'"'+new+'"'))
        elif t.type in (tokenize.STRING,tokenize.COMMENT) and docs and re.search(rf'\b{old}\b',t.string):
            edits.append((t.start,t.end,re.sub(rf'(?<=`){old}(?=[`.(\[])|(?<=`memplan\.){old}\b',new,t.string)))
    for st,en,n in sorted(edits,reverse=True):
        a=sum(len(l) for l in lines[:st[0]-1])+st[1]; b=sum(len(l) for l in lines[:en[0]-1])+en[1]
        s=s[:a]+n+s[b:]
    return s
skipped=[]
for line in SCOPED.strip().splitlines():
    m,old,new=line.split()
    if new.endswith('_'): continue
    f=path.get(m)
    if f is None or not re.search(rf'\b{old}\b',src[f]): skipped.append(line); continue
    todo={f}; origins={(m,old)}
    grow=True
    while grow:
        grow=False
        for g in files:
            for mm,n,asn in imports(g):
                if (mm,n) in origins and g not in todo:
                    todo.add(g); grow=True
                    if asn is None: origins.add((mod(g),old))
    for g in todo:
        others=[(mm,n) for mm,n,asn in imports(g) if n==old and (mm,n) not in origins]
        local=[n for n in ast.walk(trees[g]) if isinstance(n,ast.ClassDef) and n.name==old] if g!=f else []
        if others or local: print('AMBIGUOUS',g,old,others); 
        src[g]=names_tokens(src[g],old,new,'init' if g.endswith('__init__.py') else True)
        trees[g]=ast.parse(src[g])
import fnmatch
for line in GLOBAL.strip().splitlines():
    globs,old,new=line.split()
    for g in files:
        if any(g.startswith(x[:-2]) for x in globs.split(',')):
            if re.search(rf'\b{old}\b',src[g]): src[g]=names_tokens(src[g],old,new,True)
def fstrings(s,old,new):
    toks=list(tokenize.generate_tokens(io.StringIO(s).readline)); lines=s.splitlines(keepends=True)
    for t in reversed(toks):
        if t.type==tokenize.STRING and re.match(r'[rR]?[fF]',t.string) and re.search(rf'\b{old}\b',t.string):
            n=re.sub(r'\{[^{}]*\}',lambda m:re.sub(rf'\b{old}\b',new,m.group(0)),t.string)
            a=sum(len(l) for l in lines[:t.start[0]-1])+t.start[1]; b=sum(len(l) for l in lines[:t.end[0]-1])+t.end[1]
            s=s[:a]+n+s[b:]
    return s
for line in GLOBAL.strip().splitlines():
    globs,old,new=line.split()
    for g in files:
        if any(g.startswith(x[:-2]) for x in globs.split(',')): src[g]=fstrings(src[g],old,new)
# guard= -> sanitize=
G={'guard':'sanitize','guards':'sanitizers','_guards':'_sanitizers','NO_GUARDS':'NO_SANITIZERS','GUARDS':'SANITIZERS'}
for g in files:
    if g.startswith('memplan/trace') or g.startswith('memplan/runtime/guards') or g=='memplan/runtime/codegen/codegen.py': continue
    s=src[g]
    for o,n in G.items():
        if g.startswith('tests/') and o=='guards' : continue
        if o in s: s=names_tokens(s,o,n,False); s=fstrings(s,o,n)
    # module path memplan.runtime.guards must stay
    s=s.replace('memplan.runtime.sanitizers.','memplan.runtime.guards.').replace('from memplan.runtime.sanitizers import','from memplan.runtime.guards import').replace('from memplan.runtime import sanitizers','from memplan.runtime import guards')
    s=re.sub(r'"guard"','"sanitize"',s); s=re.sub(r'\bguard=',r'sanitize=',s); s=s.replace('`guard`','`sanitize`').replace('guard="','sanitize="')
    src[g]=s
for md in ['README.md','memplan/README.md']:
    p=pathlib.Path(md); 
    if p.exists(): p.write_text(p.read_text().replace('guard=','sanitize='))
for f in files:
    if pathlib.Path(f).read_text()!=src[f]: pathlib.Path(f).write_text(src[f])
print('skipped',skipped)
