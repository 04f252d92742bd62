#include "stream/descriptor.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <span>
#include <sstream>

#include "base/fixed_text.h"
#include "base/hash.h"
#include "schedule/cut.h"

namespace farandole {
namespace {

std::string number(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

/// The fields in the order in which a difference is reported.
struct Field {
  std::string_view name;
  std::string (*value)(const Descriptor&);
};
constexpr Field kFields[] = {
    {"operation", [](const Descriptor& d) { return std::string(name_of(d.spec.kind)); }},
    {"number of arrays", [](const Descriptor& d) { return std::to_string(d.arrays); }},
    {"dtype", [](const Descriptor& d) { return std::string(name_of(d.dtype)); }},
    {"counts", [](const Descriptor& d) { return text_in(d.counts); }},
    {"count", [](const Descriptor& d) { return std::to_string(d.count); }},
    {"op", [](const Descriptor& d) { return std::string(name_of(d.spec.op)); }},
    {"root", [](const Descriptor& d) { return std::to_string(d.spec.root); }},
    {"prescale", [](const Descriptor& d) { return number(d.spec.prescale); }},
    {"postscale", [](const Descriptor& d) { return number(d.spec.postscale); }},
    {"level", [](const Descriptor& d) { return std::string(name_of(d.level)); }},
    {"algorithm", [](const Descriptor& d) { return text_in(d.algorithm); }},
    {"name", [](const Descriptor& d) { return text_in(d.name); }},
};
constexpr size_t kBeforeArrays = 2;  // so many of them; then the arrays are compared one by one

std::string first_name(const std::vector<Shown>& by_rank) {
  for (const Shown& s : by_rank)
    if (s.descriptor.name[0] != 0) return text_in(s.descriptor.name);
  return "";
}

std::string text_of(const BundledArray& array, bool with_kind) {
  std::string text = with_kind ? std::string(name_of(array.kind)) + " of " : "";
  text += array.counts == 0 ? std::to_string(array.count) + " x " : "uneven shares of ";
  text += name_of(array.dtype);
  if (array.counts == 0 && array.options == 0) return text;
  char rest[40];
  std::snprintf(rest, sizeof rest, " (hash %016llx)",
                static_cast<unsigned long long>(array.counts ^ array.options));
  return text + rest;
}

/// send and recv are two ends of one operation.
Collective common_name(Collective kind) {
  return kind == Collective::recv ? Collective::send : kind;
}

/// The call's name, since ranks may have cut it into operations of other names.
const std::string& shown_name(const Operation& o) { return o.bundle ? o.bundle->name() : o.name; }

/// "3, 0, 5"; what does not fit into `most` characters is cut, and the hash of all stands instead.
std::string text_of(std::span<const size_t> counts, size_t most) {
  std::string text;
  for (const size_t n : counts) {
    if (!text.empty()) text += ", ";
    text += std::to_string(n);
    if (text.size() >= most) break;
  }
  if (text.size() < most) return text;
  char rest[40];
  std::snprintf(rest, sizeof rest, ", … (hash %016llx)",
                static_cast<unsigned long long>(hash_of(counts)));
  text.resize(text.rfind(", ", most - sizeof rest));
  return text + rest;
}

uint8_t lie_of(const Operation& o) {
  if (!o.on_devices) return 0;
  return o.on_devices->declines() ? 2 : 1;
}

size_t piece_of(const Operation& o) { return o.on_devices ? o.on_devices->piece() : 0; }

}  // namespace

Descriptor describe(const Operation& o) {
  Descriptor d;
  std::memset(static_cast<void*>(&d), 0, sizeof d);  // texts are short, and all of it is shared
  d.spec = o;
  d.spec.kind = common_name(o.kind);
  d.dtype = o.input.dtype;
  d.level = o.level;
  d.on_devices = lie_of(o);
  d.piece = piece_of(o);
  d.count = o.count;
  d.arrays = o.bundle ? o.bundle->arrays().size() : 1;
  copy_cut(o.algorithm, d.algorithm);
  copy_cut(shown_name(o), d.name);
  if (!o.counts.empty()) copy_cut(text_of(o.counts, sizeof d.counts), d.counts);
  return d;
}

uint32_t hash_of(const Operation& o) {
  Hash h;
  h.add(static_cast<uint64_t>(common_name(o.kind)) | static_cast<uint64_t>(o.input.dtype) << 8 |
        static_cast<uint64_t>(o.op) << 16 | static_cast<uint64_t>(o.level) << 24 |
        static_cast<uint64_t>(static_cast<uint32_t>(o.root)) << 32);
  h.add(o.count);
  h.add(o.prescale);
  h.add(o.postscale);
  h.add(cut(o.algorithm, sizeof Descriptor::algorithm));  // no more than others can be shown
  h.add(cut(shown_name(o), sizeof Descriptor::name));
  h.add(static_cast<uint64_t>(lie_of(o)) | static_cast<uint64_t>(piece_of(o)) << 2);
  h.add(std::span(o.counts));
  if (o.bundle) h.add(o.bundle->hash());
  const auto hash = static_cast<uint32_t>(h.value());
  return hash != 0 ? hash : 1;  // a line never used bears the flag 0, which is a number after 2^32
}

namespace {

/// Why `value_of(shown)` is not the same for all; nothing when it is.
template <typename ValueOf>
std::optional<Error> difference(const std::string& field, const std::string& what,
                                const std::vector<Shown>& by_member,
                                const std::vector<int>& members, ValueOf value_of) {
  std::map<std::string, std::vector<int>> givers;
  for (size_t r = 0; r < by_member.size(); ++r)
    givers[value_of(by_member[r])].push_back(members[r]);
  if (givers.size() < 2) return std::nullopt;
  Context where;
  where.field = field;
  where.operation = name_of(by_member.front().descriptor.spec.kind);
  where.tensor = first_name(by_member);
  std::string verdict = "ranks disagree on " + what;
  if (field != "operation") verdict += " of " + where.operation;
  if (!where.tensor.empty()) verdict += " '" + where.tensor + "'";
  where.values.assign(givers.begin(), givers.end());
  where.rank = odd_one(where.values);
  verdict += ": " + describe_values(where.values);
  where.evidence = "descriptors of all ranks were compared before any data moved";
  return Error(ErrorCode::mismatch, verdict, std::move(where));
}

/// The first array of their bundles that is not the same; they have equally many.
std::optional<Error> differing_array(const std::vector<Shown>& by_member,
                                     const std::vector<int>& members) {
  const std::vector<BundledArray>& first = by_member.front().arrays;
  for (size_t i = 0; i < first.size(); ++i) {
    const auto same = [&](const Shown& s) { return s.arrays.at(i) == first[i]; };
    if (std::ranges::all_of(by_member, same)) continue;
    const std::string which = "array " + std::to_string(i);
    const bool mixed = std::ranges::any_of(
        by_member, [&](const Shown& s) { return s.arrays[i].kind != first[i].kind; });
    return difference(which, which, by_member, members,
                      [&](const Shown& s) { return text_of(s.arrays[i], mixed); });
  }
  return std::nullopt;
}

}  // namespace

std::optional<Error> disagreement(const std::vector<Shown>& by_member,
                                  const std::vector<int>& members) {
  for (size_t i = 0; i < std::size(kFields); ++i) {
    if (i == kBeforeArrays)
      if (auto error = differing_array(by_member, members)) return error;
    const Field& field = kFields[i];
    const std::string name(field.name);
    if (auto error = difference(name, "the " + name, by_member, members,
                                [&](const Shown& s) { return field.value(s.descriptor); }))
      return error;
  }
  return std::nullopt;
}

bool lie_alike(const std::vector<Shown>& by_member) {
  return std::ranges::all_of(by_member, [&](const Shown& s) {
    return s.descriptor.on_devices == by_member.front().descriptor.on_devices;
  });
}

size_t common_piece(const std::vector<Shown>& by_member) {
  uint64_t piece = 0;
  bool all_bring = true;
  for (const Shown& s : by_member) {
    piece = std::max(piece, s.descriptor.piece);
    all_bring = all_bring && s.descriptor.piece > 0;
  }
  return all_bring || is_cut_by_elements(by_member.front().descriptor.spec.kind) ? piece : 0;
}

}  // namespace farandole
