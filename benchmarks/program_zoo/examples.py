"""Programs of pytorch/examples, on synthetic data: their modules and their loops, smaller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812  (torch's own convention)
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.program_run import NO_STEP, STEPS, Program, Run


class ConvNet(nn.Module):
    """The network of examples/mnist."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(576, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def mnist(run: Run) -> None:
    """Classify digits; the last batch of the epoch is smaller, and the batches of the test are larger."""
    data = TensorDataset(torch.randn(16 * STEPS - 4, 1, 16, 16), torch.randint(10, (16 * STEPS - 4,)))
    train_loader = DataLoader(data, batch_size=16, shuffle=True)
    test_loader = DataLoader(data, batch_size=50)
    net = ConvNet()
    optimizer = optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    model = run.compile(net, torch.randn(16, 1, 16, 16))
    if run.whole_step:
        step = run.compile_step(net, optimizer, F.nll_loss, data[:16])
    model.train()
    for inputs, target in run.steps(train_loader):
        if run.whole_step:
            run.loss(step(inputs, target))
            continue
        optimizer.zero_grad()
        output = model(inputs)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for inputs, target in test_loader:
            output = model(inputs)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += int(output.argmax(dim=1).eq(target).sum())
    scheduler.step()
    run.result("test", (test_loss, correct))
    run.state(net)


class RowRNN(nn.Module):
    """The network of examples/mnist_rnn: an LSTM over the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(input_size=16, hidden_size=32, batch_first=True)
        self.batchnorm = nn.BatchNorm1d(32)
        self.fc1 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x.reshape(-1, 16, 16))
        return F.log_softmax(self.fc1(self.batchnorm(output[:, -1, :])), dim=1)


def mnist_rnn(run: Run) -> None:
    """Classify digits by an LSTM over their rows."""
    net = RowRNN()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randn(8, 1, 16, 16), torch.randint(10, (8,))) for _ in range(STEPS)]
    model = run.compile(net, batches[0][0])
    if run.whole_step:
        step = run.compile_step(net, optimizer, F.nll_loss, batches[0])
    for inputs, target in run.steps(batches):
        if run.whole_step:
            run.loss(step(inputs, target))
            continue
        optimizer.zero_grad()
        loss = F.nll_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(batches[0][0]))
    run.state(net)


def _init_dcgan(module: nn.Module) -> None:
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)  # type: ignore[arg-type]
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)  # type: ignore[arg-type]
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]


class Discriminator(nn.Module):
    """The discriminator of examples/dcgan for pictures of 16 x 16."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).view(-1, 1).squeeze(1)


def _generator() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(10, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def dcgan(run: Run) -> None:
    """Train a generator and a discriminator, which sees real and generated pictures before one update."""
    real_label, fake_label = 1.0, 0.0
    generator, discriminator = _generator().apply(_init_dcgan), Discriminator().apply(_init_dcgan)
    fixed_noise = torch.randn(8, 10, 1, 1)
    batches = [torch.randn(8, 3, 16, 16) for _ in range(STEPS)]
    criterion = nn.BCELoss()
    optimizer_d = optim.Adam(discriminator.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimizer_g = optim.Adam(generator.parameters(), lr=0.0002, betas=(0.5, 0.999))
    net_d, net_g = run.compile(discriminator, batches[0]), run.compile(generator, fixed_noise)
    for i, real in enumerate(run.steps(batches)):
        net_d.zero_grad()
        label = torch.full((real.size(0),), real_label)
        output = net_d(real)
        loss_d_real = criterion(output, label)
        loss_d_real.backward()
        noise = torch.randn(real.size(0), 10, 1, 1)
        fake = net_g(noise)
        label.fill_(fake_label)
        output = net_d(fake.detach())
        loss_d_fake = criterion(output, label)
        loss_d_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(real_label)
        output = net_d(fake)
        loss_g = criterion(output, label)
        loss_g.backward()
        optimizer_g.step()
        run.loss(loss_d_real + loss_d_fake)
        run.loss(loss_g)
        if i % 2 == 0:
            fake = net_g(fixed_noise)
            run.result(f"samples-{i}", fake.detach())
    run.state(generator, "G")
    run.state(discriminator, "D")


class VAE(nn.Module):
    """The network of examples/vae."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc21, self.fc22 = nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the variance."""
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        """Return a draw."""
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z: Tensor) -> Tensor:
        """Return the picture of a code."""
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def vae(run: Run) -> None:
    """Train a variational autoencoder; the evaluation calls `decode` alone, on random codes."""

    def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    batches = [torch.rand(16, 1, 8, 8) for _ in range(STEPS)]
    net = VAE()
    optimizer = optim.Adam(net.parameters(), lr=1e-3)
    model = run.compile(net, batches[0])
    if run.whole_step:
        step = run.compile_step(
            net, optimizer, lambda out, x: loss_function(out[0], x, *out[1:]), (batches[0], batches[0])
        )
    model.train()
    for data in run.steps(batches):
        if run.whole_step:
            run.loss(step(data, data))
            continue
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(batches[0]))
        run.result("sample", model.decode(torch.randn(4, 8)))
    run.state(net)


class WordRNN(nn.Module):
    """The recurrent network of examples/word_language_model, with tied weights."""

    def __init__(self, ntoken: int, ninp: int, nlayers: int) -> None:
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, ninp, nlayers
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, ninp, nlayers, dropout=0.2)
        self.decoder = nn.Linear(ninp, ntoken)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        emb = self.drop(self.encoder(inputs))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        """Return zeros."""
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def word_lm_lstm(run: Run) -> None:
    """Train an LSTM by truncated backpropagation, with the update written by hand."""

    def repackage(hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return hidden[0].detach(), hidden[1].detach()

    net = WordRNN(50, 16, 2)
    batches = [(torch.randint(50, (7, 4)), torch.randint(50, (28,))) for _ in range(STEPS)]
    hidden = net.init_hidden(4)
    model = run.compile(net, batches[0][0], hidden)
    model.train()
    for data, targets in run.steps(batches):
        model.zero_grad()
        hidden = repackage(hidden)
        output, hidden = model(data, hidden)
        loss = F.nll_loss(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.5)
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(batches[0][0], repackage(hidden)))
    run.state(net)


class PositionalEncoding(nn.Module):
    """The sinusoids of examples/word_language_model."""

    pe: Tensor

    def __init__(self, d_model: int, max_len: int = 64) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(0), :])


class WordTransformer(nn.Transformer):
    """The transformer of examples/word_language_model, which keeps the mask of the last call."""

    src_mask: Tensor | None

    def __init__(self, ntoken: int, ninp: int) -> None:
        super().__init__(d_model=ninp, nhead=2, dim_feedforward=32, num_encoder_layers=2)
        self.src_mask = None
        self.pos_encoder = PositionalEncoding(ninp)
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.ninp = ninp
        self.decoder = nn.Linear(ninp, ntoken)  # type: ignore[assignment]

    def forward(self, src: Tensor, has_mask: bool = True) -> Tensor:  # type: ignore[override]
        if has_mask:
            if self.src_mask is None or self.src_mask.size(0) != len(src):
                self.src_mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        else:
            self.src_mask = None
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(self.ninp))
        output = self.decoder(self.encoder(src, mask=self.src_mask))
        return F.log_softmax(output, dim=-1)


def word_lm_transformer(run: Run) -> None:
    """Train a transformer, with the update written by hand; sequences of the evaluation are shorter."""
    net = WordTransformer(50, 16)
    batches = [(torch.randint(50, (7, 4)), torch.randint(50, (28,))) for _ in range(STEPS)]
    model = run.compile(net, batches[0][0])
    model.train()
    for data, targets in run.steps(batches):
        model.zero_grad()
        output = model(data).view(-1, 50)
        loss = F.nll_loss(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.5)
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(batches[0][0][:5]))
    run.state(net)


class Policy(nn.Module):
    """The policy of examples/reinforcement_learning."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 32)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.dropout(self.affine1(x)))
        return F.softmax(self.affine2(x), dim=1)


def _cart_pole(state: Tensor, action: int) -> tuple[Tensor, float]:
    """Return the next state of a cart with a pole, and the reward: gym's equations, without its end of an episode."""
    x, x_dot, theta, theta_dot = state.tolist()
    force = 10.0 if action == 1 else -10.0
    cos, sin = math.cos(theta), math.sin(theta)
    temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * cos / 1.1
    after = (x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc)
    return torch.tensor(after), 1.0 if abs(after[2]) < 0.21 else 0.0


def reinforce(run: Run) -> None:
    """Train a policy: 70 forwards, one for each action of an episode, before one backward."""
    policy_net = Policy()
    optimizer = optim.Adam(policy_net.parameters(), lr=1e-2)
    policy = run.compile(policy_net, torch.zeros(1, 4))
    for _ in run.steps(range(STEPS)):
        state, rewards, log_probs = torch.rand(4) * 0.1 - 0.05, [], []
        for _ in range(70):
            probs = policy(state.float().unsqueeze(0))
            m = torch.distributions.Categorical(probs)
            action = m.sample()
            log_probs.append(m.log_prob(action))
            state, reward = _cart_pole(state, int(action.item()))
            rewards.append(reward)
        total: float = 0.0
        returns: list[float] = []
        for r in rewards[::-1]:
            total = r + 0.99 * total
            returns.insert(0, total)
        scaled = torch.tensor(returns)
        scaled = (scaled - scaled.mean()) / (scaled.std() + 1e-6)
        policy_loss = [-log_prob * r for log_prob, r in zip(log_probs, scaled, strict=True)]
        optimizer.zero_grad()
        loss = torch.cat(policy_loss).sum()
        loss.backward()
        optimizer.step()
        run.loss(loss)
    policy.eval()
    with torch.no_grad():
        run.result("test", policy(torch.zeros(1, 4)))
    run.state(policy_net)


class ActorCriticNet(nn.Module):
    """The network of examples/reinforcement_learning/actor_critic.py."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 32)
        self.action_head, self.value_head = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def actor_critic(run: Run) -> None:
    """Train actor and critic of one body, by a few forwards before each backward."""
    net = ActorCriticNet()
    optimizer = optim.Adam(net.parameters(), lr=3e-2)
    model = run.compile(net, torch.zeros(4))
    for _ in run.steps(range(STEPS)):
        state, saved, rewards = torch.rand(4) * 0.1 - 0.05, [], []
        for _ in range(6):
            probs, value = model(state)
            m = torch.distributions.Categorical(probs)
            action = m.sample()
            saved.append((m.log_prob(action), value))
            state, reward = _cart_pole(state, int(action.item()))
            rewards.append(reward)
        optimizer.zero_grad()
        policy_losses = [-log_prob * (r - value.item()) for (log_prob, value), r in zip(saved, rewards, strict=True)]
        value_losses = [
            F.smooth_l1_loss(value, torch.tensor([r])) for (_, value), r in zip(saved, rewards, strict=True)
        ]
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        run.loss(loss)
    run.state(net)


class SiameseNetwork(nn.Module):
    """The network of examples/siamese_network: one body for two pictures, and a head for the pair."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, 2), nn.ReLU(),
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Linear(144, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        output1, output2 = self.body(input1).flatten(1), self.body(input2).flatten(1)
        return torch.sigmoid(self.fc(torch.cat((output1, output2), 1)))


def siamese(run: Run) -> None:
    """Tell whether two pictures show the same digit."""
    net = SiameseNetwork()
    optimizer = optim.Adadelta(net.parameters(), lr=1.0)
    criterion = nn.BCELoss()
    batches = [(torch.randn(8, 1, 16, 16), torch.randn(8, 1, 16, 16), torch.rand(8).round()) for _ in range(STEPS)]
    model = run.compile(net, *batches[0][:2])
    if run.whole_step:
        step = run.compile_step(
            net, optimizer, lambda out, y: criterion(out.squeeze(), y), (batches[0][:2], batches[0][2])
        )
    for images_1, images_2, targets in run.steps(batches):
        if run.whole_step:
            run.loss(step((images_1, images_2), targets))
            continue
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(*batches[0][:2]))
    run.state(net)


class SuperResolution(nn.Module):
    """The network of examples/super_resolution."""

    def __init__(self, upscale_factor: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 16, 5, 1, 2)
        self.conv2 = nn.Conv2d(16, 8, 3, 1, 1)
        self.conv3 = nn.Conv2d(8, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.pixel_shuffle(self.conv3(x))


def super_resolution(run: Run) -> None:
    """Enlarge pictures; the evaluation takes larger ones."""
    net = SuperResolution(2)
    optimizer = optim.Adam(net.parameters(), lr=0.001)
    criterion = nn.MSELoss()
    batches = [(torch.rand(4, 1, 12, 12), torch.rand(4, 1, 24, 24)) for _ in range(STEPS)]
    model = run.compile(net, batches[0][0])
    if run.whole_step:
        step = run.compile_step(net, optimizer, criterion, batches[0])
    for inputs, target in run.steps(batches):
        if run.whole_step:
            run.loss(step(inputs, target))
            continue
        optimizer.zero_grad()
        loss = criterion(model(inputs), target)
        run.loss(loss)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        run.result("test", model(torch.rand(2, 1, 16, 16)))
    run.state(net)


class Residual(nn.Module):
    """A residual block of examples/fast_neural_style."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pad = nn.ReflectionPad2d(1)
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3), nn.Conv2d(channels, channels, 3)
        self.in1, self.in2 = nn.InstanceNorm2d(channels, affine=True), nn.InstanceNorm2d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.in1(self.conv1(self.pad(x))))
        return self.in2(self.conv2(self.pad(out))) + x


class StyleNet(nn.Module):
    """The transformer network of examples/fast_neural_style, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.ReflectionPad2d(2)
        self.first, self.down = nn.Conv2d(3, 8, 5), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm = nn.InstanceNorm2d(16, affine=True)
        self.blocks = nn.Sequential(Residual(16), Residual(16))
        self.last = nn.Conv2d(16, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.down(self.first(self.pad(x)))))
        y = F.interpolate(self.blocks(y), mode="nearest", scale_factor=2)
        return self.last(y)


class Features(nn.Module):
    """The slices of a frozen VGG whose outputs are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU())
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.slice1(x)
        return first, self.slice2(first)


def fast_neural_style(run: Run) -> None:
    """Train a style network against the features of a frozen network, which is called twice before the backward."""

    def gram_matrix(y: Tensor) -> Tensor:
        b, ch, h, w = y.size()
        features = y.view(b, ch, w * h)
        return features.bmm(features.transpose(1, 2)) / (ch * h * w)

    net, features = StyleNet(), Features()
    optimizer = optim.Adam(net.parameters(), 1e-3)
    mse_loss = nn.MSELoss()
    batches = [torch.rand(2, 3, 16, 16) for _ in range(STEPS)]
    transformer = run.compile(net, batches[0])
    vgg = run.compile(features, batches[0].clone().requires_grad_())
    gram_style = [gram_matrix(y) for y in features(torch.rand(2, 3, 16, 16))]
    for x in run.steps(batches):
        optimizer.zero_grad()
        y = transformer(x)
        features_y, features_x = vgg(y), vgg(x)
        content_loss = 1e5 * mse_loss(features_y[1], features_x[1])
        style_loss = torch.zeros(())
        for ft_y, gm_s in zip(features_y, gram_style, strict=True):
            style_loss = style_loss + mse_loss(gram_matrix(ft_y), gm_s)
        total_loss = content_loss + 1e10 * style_loss
        total_loss.backward()
        optimizer.step()
        run.loss(total_loss)
    transformer.eval()
    with torch.no_grad():
        run.result("test", transformer(batches[0]))
    run.state(net)


class Sequence(nn.Module):
    """The network of examples/time_sequence_prediction: two LSTM cells, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 9), nn.LSTMCell(9, 9)
        self.linear = nn.Linear(9, 1)

    def forward(self, inputs: Tensor, future: int = 0) -> Tensor:
        outputs = []
        h_t = c_t = h_t2 = c_t2 = torch.zeros(inputs.size(0), 9, dtype=inputs.dtype)
        for input_t in inputs.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


def time_sequence(run: Run) -> None:
    """Fit sine waves with LBFGS, which calls the model several times in a step; the evaluation predicts further."""
    data = torch.sin(torch.arange(12.0, dtype=torch.float64) / 3 + torch.arange(6.0)[:, None])
    inputs, target = data[3:, :-1], data[3:, 1:]
    net = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(net.parameters(), lr=0.8, max_iter=4)
    seq = run.compile(net, inputs)
    for _ in run.steps(range(STEPS)):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = criterion(seq(inputs), target)
            loss.backward()
            return loss

        run.loss(optimizer.step(closure))
    with torch.no_grad():
        run.result("test", seq(data[:3, :-1], future=4))
    run.state(net)


class SpeechNet(nn.Module):
    """Convolutions and a GRU that give the log-probabilities of letters at each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(12, 16, 3, 2, 1)
        self.gru = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(32, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv(x)).transpose(1, 2)
        return F.log_softmax(self.fc(self.gru(x)[0]), dim=-1).transpose(0, 1)


def ctc_speech(run: Run) -> None:
    """Train a speech recogniser with the connectionist loss outside of the compiled model."""
    net = SpeechNet()
    criterion = nn.CTCLoss(zero_infinity=True)
    optimizer = optim.AdamW(net.parameters(), 5e-4)
    batches = [
        (torch.randn(4, 12, 40), torch.randint(1, 9, (4, 6)), torch.randint(15, 21, (4,)), torch.randint(2, 7, (4,)))
        for _ in range(STEPS)
    ]
    model = run.compile(net, batches[0][0])
    for spectrograms, labels, input_lengths, label_lengths in run.steps(batches):
        optimizer.zero_grad()
        loss = criterion(model(spectrograms), labels, input_lengths, label_lengths)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(batches[0][0]))
    run.state(net)


class WithCTC(nn.Module):
    """The recogniser with its loss in the forward, as wrappers for several devices have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SpeechNet()

    def forward(self, spectrograms: Tensor, labels: Tensor, lengths: Tensor, label_lengths: Tensor) -> Tensor:
        return F.ctc_loss(self.net(spectrograms), labels, lengths, label_lengths)


def ctc_inside(run: Run) -> None:
    """Train a speech recogniser whose forward computes the loss, which checks its lengths."""
    net = WithCTC()
    optimizer = optim.AdamW(net.parameters(), 5e-4)
    batches = [
        (torch.randn(4, 12, 40), torch.randint(1, 9, (4, 6)), torch.full((4,), 20), torch.randint(2, 7, (4,)))
        for _ in range(STEPS)
    ]
    model = run.compile(net, *batches[0])
    if run.whole_step:
        step = run.compile_step(net, optimizer, lambda loss: loss, batches[0])
    for batch in run.steps(batches):
        if run.whole_step:
            run.loss(step(*batch))
            continue
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    run.state(net)


class ForwardLayer(nn.Linear):
    """A layer of examples/mnist_forward_forward, which trains itself with its own optimizer."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.opt = optim.Adam(self.parameters(), lr=0.03)

    def forward(self, x: Tensor) -> Tensor:
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(torch.mm(direction, self.weight.T) + self.bias.unsqueeze(0))


def forward_forward(run: Run) -> None:
    """Train layers one by one on positive and negative data: two forwards of a layer before its backward."""
    layers = [ForwardLayer(36, 24), ForwardLayer(24, 24)]
    x_pos, x_neg = torch.rand(8, 36), torch.rand(8, 36)
    called: list[Any] = [run.compile(layers[0], x_pos), run.compile(layers[1], torch.rand(8, 24))]
    for _ in run.steps(range(STEPS)):
        h_pos, h_neg = x_pos, x_neg
        for layer, call in zip(layers, called, strict=True):
            g_pos, g_neg = call(h_pos).pow(2).mean(1), call(h_neg).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([-g_pos + 2.0, g_neg - 2.0]))).mean()
            layer.opt.zero_grad()
            loss.backward()
            layer.opt.step()
            run.loss(loss)
            h_pos, h_neg = call(h_pos).detach(), call(h_neg).detach()
    for i, layer in enumerate(layers):
        run.state(layer, f"layer{i}")


class GraphConv(nn.Module):
    """A layer of examples/gcn: a sparse adjacency, given as a dense matrix, times features times weights."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(in_features, out_features))
        nn.init.xavier_normal_(self.kernel)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.mm(adjacency, torch.mm(x, self.kernel)) + self.bias


class GCN(nn.Module):
    """The network of examples/gcn."""

    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConv(12, 8), GraphConv(8, 3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, adjacency = inputs
        x = F.relu(self.gc1(x, adjacency))
        return F.log_softmax(self.gc2(self.dropout(x), adjacency), dim=1)


def gcn(run: Run) -> None:
    """Classify the nodes of a graph: the loss takes those of a boolean mask, the model all."""
    net = GCN()
    optimizer = optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    graph, labels = (torch.rand(20, 12), torch.rand(20, 20).softmax(1)), torch.randint(3, (20,))
    mask = torch.arange(20) < 12
    criterion = nn.NLLLoss()
    model = run.compile(net, graph)
    for _ in run.steps(range(STEPS)):
        model.train()
        optimizer.zero_grad()
        output = model(graph)
        loss = criterion(output[mask], labels[mask])
        loss.backward()
        optimizer.step()
        run.loss(loss)
        model.eval()
        with torch.no_grad():
            run.result(f"test-{len(run.losses)}", model(graph).argmax(1)[~mask].eq(labels[~mask]).float().mean())
    run.state(net)


class Seq2Seq(nn.Module):
    """The network of examples/language_translation, around `nn.Transformer`."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.src_emb, self.tgt_emb = nn.Embedding(30, 16), nn.Embedding(30, 16)
        self.generator = nn.Linear(16, 30)

    def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_pad: Tensor, tgt_pad: Tensor) -> Tensor:
        outs = self.transformer(
            self.src_emb(src), self.tgt_emb(trg), tgt_mask=tgt_mask,
            src_key_padding_mask=src_pad, tgt_key_padding_mask=tgt_pad, memory_key_padding_mask=src_pad,
        )  # fmt: skip
        return self.generator(outs)


def language_translation(run: Run) -> None:
    """Train a transformer for translation, with masks that are computed outside."""
    net = Seq2Seq()
    optimizer = optim.Adam(net.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    loss_fn = nn.CrossEntropyLoss(ignore_index=1)
    batches = [(torch.randint(1, 30, (4, 9)), torch.randint(1, 30, (4, 8))) for _ in range(STEPS)]

    def arguments(src: Tensor, tgt: Tensor) -> tuple[Tensor, ...]:
        tgt_input = tgt[:, :-1]
        mask = torch.triu(torch.full((7, 7), float("-inf")), diagonal=1)
        pads = torch.zeros(src.shape).masked_fill(src == 1, float("-inf"))
        return src, tgt_input, mask, pads, torch.zeros(tgt_input.shape).masked_fill(tgt_input == 1, float("-inf"))

    model = run.compile(net, *arguments(*batches[0]))
    model.train()
    for src, tgt in run.steps(batches):
        logits = model(*arguments(src, tgt))
        optimizer.zero_grad()
        tgt_out = tgt[:, 1:]
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        loss.backward()
        optimizer.step()
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(*arguments(*batches[0])))
    run.state(net)


def regression(run: Run) -> None:
    """Fit a polynomial, until the loss is small, with the update written by hand."""
    net = nn.Linear(4, 1)
    weights, bias = torch.randn(4, 1) * 5, torch.randn(1) * 5
    fc = run.compile(net, torch.randn(32, 4))
    for _ in run.steps(range(STEPS)):
        random = torch.randn(32).unsqueeze(1)
        x = torch.cat([random**i for i in range(1, 5)], 1)
        y = x.mm(weights) + bias[0]
        fc.zero_grad()
        output = F.smooth_l1_loss(fc(x), y)
        loss = output.item()
        output.backward()
        for param in fc.parameters():
            param.data.add_(-0.1 * param.grad)
        run.loss(output)
        if loss < 1e-3:
            break
    run.state(net)


PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "mnist": Program(run=mnist),
        "mnist_rnn": Program(run=mnist_rnn),
        "dcgan": Program(run=dcgan, ways=NO_STEP),
        "vae": Program(run=vae),
        "word_lm_lstm": Program(run=word_lm_lstm, ways=NO_STEP),
        "word_lm_transformer": Program(run=word_lm_transformer, ways=NO_STEP),
        "reinforce": Program(run=reinforce, ways=NO_STEP),
        "actor_critic": Program(run=actor_critic, ways=NO_STEP),
        "siamese": Program(run=siamese),
        "super_resolution": Program(run=super_resolution),
        "fast_neural_style": Program(run=fast_neural_style, ways=NO_STEP),
        "time_sequence": Program(run=time_sequence, ways=NO_STEP),
        "ctc_speech": Program(run=ctc_speech, ways=NO_STEP),
        "ctc_inside": Program(run=ctc_inside),
        "forward_forward": Program(run=forward_forward, ways=NO_STEP),
        "gcn": Program(run=gcn, ways=NO_STEP),
        "language_translation": Program(run=language_translation, ways=NO_STEP),
        "regression": Program(run=regression, ways=NO_STEP),
    }
)
