"""Moves modules by map.txt and rewrites imports, dotted strings and file names. Run in a clean checkout."""
import ast, os, re, subprocess, sys, pathlib
ROOT=pathlib.Path.cwd()
def git(*a): return subprocess.check_output(['git',*a],text=True)
M={}
for l in open('/tmp/move/map.txt'):
    l=l.split('#')[0].split()
    if len(l)==2: M['memplan.'+l[0]]='memplan.'+l[1]
T={}
for l in open('/tmp/move/tests.txt'):
    l=l.split('#')[0].split()
    if len(l)==2: T[l[0]]=l[1]   # dotted tests.x -> tests.y
ALL={**M,**T}
files=[f for f in git('ls-files','*.py').split()]
def mod(f): return f[:-3].replace('/','.').removesuffix('.__init__')
mods={mod(f):f for f in files}
isdir={mod(f) for f in files if f.endswith('__init__.py')}
missing=[m for m in ALL if m not in mods]
assert not missing, missing
# new module under a package that moved as a whole (e.g. memplan.solve.x not listed)
def new(m):
    if m in ALL: return ALL[m]
    parts=m.split('.')
    for k in range(len(parts)-1,1,-1):
        p='.'.join(parts[:k])
        if p in ALL and p in isdir: return ALL[p]+'.'+'.'.join(parts[k:])
    return m
N={m:new(m) for m in mods}
exports={}  # package -> names bound in its __init__ by other means than being a submodule
for m,f in mods.items():
    if f.endswith('__init__.py'):
        names=set()
        for n in ast.walk(ast.parse(open(f).read())):
            if isinstance(n,ast.ImportFrom):
                for a in n.names:
                    if f'{n.module}.{a.name}' not in mods or f'{n.module}.{a.name}.{a.name}': names.add(a.asname or a.name)
            elif isinstance(n,(ast.FunctionDef,ast.ClassDef)): names.add(n.name)
        exports[m]=names
def is_function_export(pkg,name): return name in exports.get(pkg,()) and f'{pkg}.{name}' in mods and pkg!='memplan.cli' and not (pkg=='memplan' and name in('csvio',))
renamed={}  # local names of modules that changed: per file
def rewrite_py(path, src):
    tree=ast.parse(src)
    lines=src.splitlines(keepends=True)
    edits=[]; renames={}
    for n in ast.walk(tree):
        if isinstance(n,ast.ImportFrom) and n.module and (n.module.split('.')[0] in('memplan','tests')) and n.level==0:
            groups={}
            for a in n.names:
                full=f'{n.module}.{a.name}'
                if full in mods and not is_function_export(n.module,a.name):
                    nm=N[full]; pkg,_,leaf=nm.rpartition('.')
                    s=leaf
                    if a.asname: s=f'{leaf} as {a.asname}'
                    elif leaf!=a.name: renames[a.name]=leaf
                    groups.setdefault(pkg,[]).append(s)
                else:
                    tgt=N.get(n.module,n.module)
                    groups.setdefault(tgt,[]).append(a.name+(f' as {a.asname}' if a.asname else ''))
            old=ast.get_source_segment(src,n)
            indent=' '*n.col_offset
            if set(groups)=={n.module} and not any(x for x in renames): continue
            if set(groups)=={n.module}: 
                pass
            out=[]
            for p,names in groups.items():
                one=f'from {p} import '+', '.join(names)
                out.append(one if len(indent+one)<=120 else f'from {p} import (\n'+''.join(f'{indent}    {x},\n' for x in names)+f'{indent})')
            edits.append((n.lineno-1,n.end_lineno,n.col_offset,('\n'+indent).join(out)))
    for a,b,col,text in sorted(edits,reverse=True):
        tail=lines[b-1].rstrip('\n')
        seg_end=tail
        # keep trailing comments
        m=re.search(r'(\s+#.*)$',tail) if b-1==a or True else None
        comment=m.group(1) if m and '#' in tail else ''
        lines[a:b]=[' '*col+text+comment+'\n']
    src=''.join(lines)
    for o,nw in renames.items():
        src=re.sub(rf'(?<![\w.\'"/`]){o}\.(?=\w)',nw+'.',src)
        src=re.sub(rf'(setattr\(){o},',rf'\g<1>{nw},',src)
        src=re.sub(rf'(reload\(){o}\)',rf'\g<1>{nw})',src)
    return src
dotted=sorted((m for m in mods if N[m]!=m and m!='memplan'),key=len,reverse=True)
pat=re.compile(r'(?<![\w.])('+'|'.join(map(re.escape,dotted))+r')(?![\w])') if dotted else None
PUBLIC={'memplan.check','memplan.record','memplan.schedule','memplan.symbolic','memplan.plan','memplan.solve','memplan.validate','memplan.diff','memplan.explain','memplan.csvio','memplan.graph'}
def rewrite_text(s, py):
    def sub(m):
        name=m.group(1)
        rest=s[m.end():m.end()+1]
        if name in PUBLIC and rest!='.' : return name      # the public name
        if name in ('memplan.csvio',): return name
        return N[name]
    if not py: return pat.sub(sub,s)
    out=[]
    for line in s.splitlines(keepends=True):
        if re.match(r'\s*(from memplan|from tests|import memplan)',line): out.append(line); continue
        def sub1(m,line=line):
            name=m.group(1); rest=line[m.end():m.end()+1]
            if name in PUBLIC and rest!='.': return name
            return N[name]
        out.append(pat.sub(sub1,line))
    return ''.join(out)
# moves
for m in sorted(mods,key=lambda m:-m.count('.')):
    if N[m]==m: continue
    f=mods[m]; leaf='/__init__.py' if f.endswith('__init__.py') else '.py'
    t=N[m].replace('.','/')+leaf
    (ROOT/t).parent.mkdir(parents=True,exist_ok=True)
    tmp=t+'.moving'
    git('mv',f,tmp)
for m in mods:
    if N[m]==m: continue
    f=mods[m]; leaf='/__init__.py' if f.endswith('__init__.py') else '.py'
    t=N[m].replace('.','/')+leaf
    git('mv',t+'.moving',t)
# other files of moved packages
for f in files: pass
newfiles={ (N[m].replace('.','/')+('/__init__.py' if f.endswith('__init__.py') else '.py')):f for m,f in mods.items()}
for t in newfiles:
    p=ROOT/t; s=p.read_text(); o=s
    s=rewrite_py(t,s); s=rewrite_text(s,True)
    if s!=o: p.write_text(s)
# inits
for m in set(N.values()):
    parts=m.split('.')[:-1]
    for k in range(1,len(parts)+1):
        d=ROOT/'/'.join(parts[:k])/'__init__.py'
        if not d.exists():
            d.parent.mkdir(parents=True,exist_ok=True); d.write_text(f'"""{".".join(parts[:k])}: to be described."""\n'); git('add',str(d))
# dotted names elsewhere
for f in git('ls-files').split():
    if f.endswith(('.md','.toml','.sh','.importlinter','.json','.yml')) or f=='.ci/run':
        if f.endswith('.json'): continue
        p=ROOT/f; s=p.read_text(); o=rewrite_text(s,False)
        if o!=s: p.write_text(o)
# file names in prose: `x.py` where unique basename changed
base={}
for m in mods:
    b=mods[m].split('/')[-1]
    base.setdefault(b,set()).add(N[m].split('.')[-1]+'.py' if b!='__init__.py' else b)
ren={b:next(iter(v)) for b,v in base.items() if len(v)==1 and next(iter(v))!=b}
rp=re.compile(r'(?<![\w/.])('+'|'.join(map(re.escape,sorted(ren,key=len,reverse=True)))+r')(?!\w)')
for t in list(newfiles)+[f for f in git('ls-files','*.md').split()]:
    p=ROOT/t
    if t.startswith('tests/') or 'CHANGELOG' in t: continue
    s=p.read_text(); o=rp.sub(lambda m:ren[m.group(1)],s)
    if o!=s: p.write_text(o)
git('add','-A')
print('moved',sum(N[m]!=m for m in mods),'modules')
