#include "named/signature.h"

#include <algorithm>
#include <array>
#include <map>
#include <sstream>

#include "base/wire.h"

namespace farandole {
namespace {

bool gathers(const Signature& t) { return t.kind == Collective::all_gather; }
bool exchanges(const Signature& t) { return t.kind == Collective::all_to_all; }

std::string number(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

std::string shape_text(const Signature& t, const TensorSignature& tensor) {
  std::string text = "[";
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    const bool free = i == 0 && (gathers(t) || exchanges(t));  // differs between ranks as it likes
    text += (i > 0 ? ", " : "") + (free ? std::string("…") : std::to_string(tensor.shape[i]));
  }
  return text + "]";
}

/// "float32 × 3, int64": by runs, so that a group of many tensors stays readable.
template <typename Text>
std::string by_runs(const Signature& t, Text text_of) {
  std::string all;
  for (size_t i = 0; i < t.tensors.size();) {
    const std::string text = text_of(t.tensors[i]);
    size_t end = i + 1;
    while (end < t.tensors.size() && text_of(t.tensors[end]) == text) ++end;
    all += (all.empty() ? "" : ", ") + text;
    if (end - i > 1) all += " × " + std::to_string(end - i);
    i = end;
  }
  return all;
}

/// The fields in the order in which a difference is reported.
struct Field {
  std::string_view name;
  std::string (*value)(const Signature&);
};
constexpr Field kFields[] = {
    {"device", [](const Signature& t) { return t.device; }},
    {"number of tensors", [](const Signature& t) { return std::to_string(t.tensors.size()); }},
    {"dtype",
     [](const Signature& t) {
       return by_runs(t, [](const TensorSignature& x) { return std::string(name_of(x.dtype)); });
     }},
    {"shape",
     [](const Signature& t) {
       return by_runs(t, [&](const TensorSignature& x) { return shape_text(t, x); });
     }},
    {"op", [](const Signature& t) { return std::string(name_of(t.op)); }},
    {"root", [](const Signature& t) { return std::to_string(t.root); }},
    {"prescale", [](const Signature& t) { return number(t.prescale); }},
    {"postscale", [](const Signature& t) { return number(t.postscale); }},
};

using Givers = std::map<std::string, std::vector<int>>;

Error differs(std::string_view field, const Signature& any, const Givers& givers) {
  Context where;
  where.field = field;
  where.operation = name_of(any.kind);
  where.tensor = any.name;
  where.values.assign(givers.begin(), givers.end());
  where.rank = odd_one(where.values);
  const std::string verdict = "ranks disagree on the " + std::string(field) + " of " + any.title() +
                              ": " + describe_values(where.values);
  where.evidence = "what the ranks asked for by this name was compared before any data moved";
  return {ErrorCode::mismatch, verdict, std::move(where)};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// The first line of the notes that is not the same everywhere.
std::optional<Error> differing_line(std::span<const Signature* const> by_member,
                                    const std::vector<int>& members) {
  const Signature* any = nullptr;
  bool equal = true;
  for (const Signature* signature : by_member) {
    if (signature == nullptr) continue;
    if (any == nullptr) any = signature;
    equal &= signature->note == any->note;
  }
  if (equal) return std::nullopt;
  std::vector<std::vector<std::string>> lines;
  for (const Signature* signature : by_member)
    lines.push_back(signature == nullptr ? std::vector<std::string>() : lines_of(signature->note));
  for (size_t i = 0;; ++i) {
    Givers givers;
    for (size_t m = 0; m < by_member.size(); ++m)
      if (by_member[m] != nullptr)
        givers[i < lines[m].size() ? lines[m][i] : "nothing"].push_back(members[m]);
    if (givers.size() > 1) return differs("entry " + std::to_string(i), *any, givers);
    if (givers.begin()->first == "nothing") return std::nullopt;  // line ends alone differ
  }
}

}  // namespace

std::vector<int64_t> extents_of(const Signature& t) {
  if (exchanges(t)) return t.splits;
  std::vector<int64_t> extents;
  if (gathers(t))
    for (const TensorSignature& tensor : t.tensors) extents.push_back(tensor.shape.at(0));
  return extents;
}

size_t extents_count(const Signature& t, size_t members) {
  return exchanges(t) ? members : gathers(t) ? t.tensors.size() : 0;
}

namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 62;  // of a tensor, and of a result

/// The product of what is not negative, and fits.
uint64_t product_of(std::span<const int64_t> factors, uint64_t product) {
  for (const int64_t factor : factors) {
    if (factor < 0) WireReader::malformed("an extent of " + std::to_string(factor));
    if (__builtin_mul_overflow(product, static_cast<uint64_t>(factor), &product) ||
        product > kMostBytes)
      WireReader::malformed("a tensor of more bytes than there are");
  }
  return product;
}

bool goes_by_name(Collective kind) {
  constexpr std::array kKinds{Collective::all_reduce,     Collective::broadcast,
                              Collective::all_gather,     Collective::all_to_all,
                              Collective::reduce_scatter, Collective::barrier};
  return std::ranges::find(kKinds, kind) != kKinds.end();
}

}  // namespace

void check_signature(const Signature& t, const std::vector<int>& members) {
  if (!goes_by_name(t.kind))
    WireReader::malformed("a " + std::string(name_of(t.kind)) + " by name");
  if (t.kind == Collective::barrier ? !t.tensors.empty() : t.tensors.empty())
    WireReader::malformed(t.title() + " of " + std::to_string(t.tensors.size()) + " tensors");
  if (t.kind == Collective::broadcast && std::ranges::find(members, t.root) == members.end())
    WireReader::malformed("the root " + std::to_string(t.root) + ", which is no member");
  const bool by_rows = gathers(t) || exchanges(t) || t.kind == Collective::reduce_scatter;
  for (const TensorSignature& tensor : t.tensors) {
    if (by_rows && tensor.shape.empty()) WireReader::malformed("a tensor without rows");
    product_of(tensor.shape, size_of(tensor.dtype));
    if (folds(t.kind) && !has_meaning(t.op, tensor.dtype))
      WireReader::malformed(std::string(name_of(t.op)) + " of " +
                            std::string(name_of(tensor.dtype)));
  }
  if (!exchanges(t)) {
    if (!t.splits.empty()) WireReader::malformed("splits of " + t.title());
    return;
  }
  if (t.tensors.size() != 1 || t.splits.size() != members.size())
    WireReader::malformed("splits of another number of members");
  int64_t rows = 0;
  for (const int64_t n : t.splits)
    if (n < 0 || __builtin_add_overflow(rows, n, &rows))
      WireReader::malformed("a split of " + std::to_string(n));
  if (rows != t.tensors[0].shape[0]) WireReader::malformed("splits that are not all rows");
}

void check_extents(const Signature& t, size_t members, std::span<const int64_t> extents, int member,
                   std::span<const int64_t> own) {
  const size_t each = extents_count(t, members);
  if (extents.size() != each * members)
    WireReader::malformed(std::to_string(extents.size()) + " extents of " + t.title());
  for (size_t i = 0; i < each; ++i)
    if (extents[static_cast<size_t>(member) * each + i] != (own.empty() ? 0 : own[i]))
      WireReader::malformed("other extents of " + t.title() + " than this rank has given");
  for (size_t i = 0; i < each; ++i) {  // of one tensor, or of what one member gets
    const TensorSignature& tensor = t.tensors[gathers(t) ? i : 0];
    int64_t rows = 0;
    for (size_t m = 0; m < members; ++m)
      if (extents[m * each + i] < 0 || __builtin_add_overflow(rows, extents[m * each + i], &rows))
        WireReader::malformed("an extent of " + std::to_string(extents[m * each + i]));
    const std::span<const int64_t> rest = std::span(tensor.shape).subspan(1);
    product_of(rest, product_of({&rows, 1}, size_of(tensor.dtype)));
  }
}

std::optional<Error> disagreement(std::span<const Signature* const> by_member,
                                  const std::vector<int>& members) {
  if (auto error = differing_line(by_member, members)) return error;
  for (const Field& field : kFields) {
    Givers givers;
    const Signature* any = nullptr;
    for (size_t m = 0; m < by_member.size(); ++m) {
      if (by_member[m] == nullptr) continue;
      any = by_member[m];
      givers[field.value(*any)].push_back(members[m]);
    }
    if (givers.size() > 1) return differs(field.name, *any, givers);
  }
  return std::nullopt;
}

}  // namespace farandole
