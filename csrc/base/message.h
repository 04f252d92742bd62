// A message is a struct and one list of its fields, in the order in which they travel. By that list
// it is written and read, and its layout's hash is computed (base/message_layout.h), so that none
// of the three can forget what another knows.
//
//   struct Question { uint64_t key = 0; };
//   template <>
//   inline constexpr auto fields_of<Question> = Fields<Sent<&Question::key>>{};
//
// Numbers travel as they lie in memory, enumerations and bools as one byte, texts and lists behind
// their length, messages within messages field by field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/fixed_text.h"
#include "base/wire.h"

namespace farandole {

template <typename Member>
struct MemberOf;
template <typename Message, typename Type_>
struct MemberOf<Type_ Message::*> {
  using Type = Type_;
};

/// `Limit`: an enumeration's last value; of a text or list the most bytes or entries that are read.
template <auto Member, auto Limit = 0>
struct Sent {
  using Type = typename MemberOf<decltype(Member)>::Type;
  static constexpr auto kMember = Member;
  static constexpr auto kLimit = Limit;
};

template <typename... Each>
struct Fields {
  template <typename Visit>
  static constexpr void for_each([[maybe_unused]] Visit visit) {
    (visit(Each{}), ...);
  }
};

template <typename Message>
inline constexpr auto fields_of = nullptr;

template <typename T>
inline constexpr bool is_message =
    !std::is_null_pointer_v<std::remove_cv_t<decltype(fields_of<T>)>>;
template <typename T>
inline constexpr bool is_message_list = false;
template <typename T>
inline constexpr bool is_message_list<std::vector<T>> = is_message<T>;
template <typename T>
inline constexpr bool is_optional_message = false;
template <typename T>
inline constexpr bool is_optional_message<std::optional<T>> = is_message<T>;
template <typename T>
inline constexpr bool is_fixed_text =
    std::is_array_v<T> && std::is_same_v<std::remove_extent_t<T>, char>;

// ---- writing ----

template <typename Message>
void put_message(WireWriter& to, const Message& message);

template <typename T>
void put_value(WireWriter& to, const T& value) {
  if constexpr (is_message<T>) {
    put_message(to, value);
  } else if constexpr (std::is_enum_v<T> || std::is_same_v<T, bool>) {
    to.put(static_cast<uint8_t>(value));
  } else if constexpr (std::is_arithmetic_v<T>) {
    to.put(value);
  } else if constexpr (is_fixed_text<T>) {
    to.put_text(text_in(value));
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    to.put_text(value);
  } else if constexpr (is_optional_message<T>) {
    to.put(static_cast<uint8_t>(value.has_value()));
    if (value) put_message(to, *value);
  } else if constexpr (is_message_list<T>) {
    to.put(static_cast<uint32_t>(value.size()));
    for (const auto& each : value) put_message(to, each);
  } else {
    to.put_list(std::span<const typename T::value_type>(value));
  }
}

template <typename Message>
void put_message(WireWriter& to, const Message& message) {
  fields_of<Message>.for_each([&]<typename F>(F) { put_value(to, message.*F::kMember); });
}

/// A field's type where a message is written without a struct: lists and texts are views.
template <typename T>
struct GivenAs {
  using Type = T;
};
template <typename T>
  requires(!is_message<T>)
struct GivenAs<std::vector<T>> {
  using Type = std::span<const T>;
};
template <>
struct GivenAs<std::string> {
  using Type = std::string_view;
};

template <typename... Each>
void put_fields(WireWriter& to, Fields<Each...>,
                const typename GivenAs<typename Each::Type>::Type&... values) {
  (put_value(to, values), ...);
}

/// A message from its fields, one after the other.
template <typename Message, typename... Values>
void put_as(WireWriter& to, const Values&... values) {
  put_fields(to, fields_of<Message>, values...);
}

/// The same behind the number that tells it from others.
template <typename Message, typename... Values>
void put_tagged(WireWriter& to, const Values&... values) {
  to.put(Message::kTag);
  put_as<Message>(to, values...);
}

// ---- reading ----

enum class Truth : uint8_t { no, yes };

template <typename Message>
Message get_message(WireReader& from);

template <auto Limit, typename T>
void get_value(WireReader& from, T& value) {
  if constexpr (is_message<T>) {
    value = get_message<T>(from);
  } else if constexpr (std::is_enum_v<T>) {
    static_assert(std::is_same_v<T, std::remove_cv_t<decltype(Limit)>>, "name its last value");
    value = from.get_enum(Limit);
  } else if constexpr (std::is_same_v<T, bool>) {
    value = from.get_enum(Truth::yes) == Truth::yes;
  } else if constexpr (std::is_arithmetic_v<T>) {
    value = from.get<T>();
  } else if constexpr (is_fixed_text<T>) {
    copy_cut(from.get_text(sizeof value - 1), value);
  } else if constexpr (is_optional_message<T>) {
    value.reset();
    if (from.get_enum(Truth::yes) == Truth::yes) value = get_message<typename T::value_type>(from);
  } else {
    static_assert(Limit > 0, "bound what is read");
    if constexpr (std::is_same_v<T, std::string>) {
      value = from.get_text(Limit);
    } else if constexpr (is_message_list<T>) {
      const auto count = from.get<uint32_t>();
      if (count > Limit) WireReader::malformed("a list of " + std::to_string(count) + " entries");
      value.clear();  // grows as they come: the count alone allocates nothing
      for (uint32_t i = 0; i < count; ++i)
        value.push_back(get_message<typename T::value_type>(from));
    } else {
      value = from.get_list<typename T::value_type>(Limit);
    }
  }
}

/// Throws Malformed where it is.
template <typename Message>
Message get_message(WireReader& from) {
  Message message{};
  fields_of<Message>.for_each(
      [&]<typename F>(F) { get_value<F::kLimit>(from, message.*F::kMember); });
  return message;
}

/// The same bounds for a message that was not read but lies in memory that others write. Throws
/// Malformed.
template <typename Message>
void check_fields(const Message& message) {
  fields_of<Message>.for_each([&]<typename F>(F) {
    using T = typename F::Type;
    const T& value = message.*F::kMember;
    if constexpr (is_message<T>)
      check_fields(value);
    else if constexpr (std::is_enum_v<T>)
      if (value > F::kLimit)
        WireReader::malformed("the number " + std::to_string(static_cast<int>(value)));
  });
}

/// All of the bytes: nothing may follow.
template <typename Message>
Message get_whole(std::span<const std::byte> bytes) {
  WireReader from(bytes);
  Message message = get_message<Message>(from);
  from.end();
  return message;
}

}  // namespace farandole
